"""Two models whose popularity shifts: fleets that serve them, and the load.

Each has a core. ``NORTH`` has little KV memory of its own (``OWN_BLOCKS``), ``SOUTH`` more than it
needs but when it is popular itself (``LENDER_BLOCKS``), of which it can lend ``LENT_BLOCKS``.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.engine import BLOCK_TOKENS, block_bytes
from benchmarks.load import Request
from benchmarks.platforms import PROGRAMS, Platform, configuration, served
from benchmarks.workload import Arrival, window

CONTEXT = 256
NORTH, SOUTH = "north", "south"
DEVICES = {NORTH: "core0", SOUTH: "core1"}
OWN_BLOCKS, LENDER_BLOCKS, LENT_BLOCKS = 16, 128, 80
BLOCKS = {NORTH: OWN_BLOCKS, SOUTH: LENDER_BLOCKS}
EVEN = dict.fromkeys(BLOCKS, sum(BLOCKS.values()) // 2)
AMPLE = dict.fromkeys(BLOCKS, 256)
"""For all requests of each model."""
PLACES = 32
_PLACEHOLDER = 1
"""A block that vLLM keeps for itself, in every engine."""


@dataclass(frozen=True)
class FleetKind:
    """How both models are served.

    Attributes:
        replicas: of each model; ``auto``: as many as the controller thinks fit, two at most.
        blocks: KV memory of each model, for as many replicas as there may be.
        lends: whether ``SOUTH`` lends to ``NORTH``.
        roles: whether one replica prefills and one decodes.
    """

    replicas: int | str
    blocks: Mapping[str, int]
    lends: bool = False
    roles: bool = False

    def places(self) -> int:
        """Devices that each model may be on."""
        return 1 if self.replicas == 1 else len(DEVICES)


KINDS = {
    "lending": FleetKind(1, BLOCKS, lends=True),
    "unified": FleetKind(2, BLOCKS),
    "unified_even": FleetKind(2, EVEN),
    "separated": FleetKind(2, BLOCKS, roles=True),
    "separated_even": FleetKind(2, EVEN, roles=True),
    "alone": FleetKind(1, AMPLE),
    "by_controller": FleetKind("auto", AMPLE),
    "ample_unified": FleetKind(2, AMPLE),
}
"""The first five have the same blocks in all, and so have the last three."""


def configured(kind: str, model: str, port: int, dtype: str, store: bool) -> dict[str, Any]:
    """Of a platform that serves both names by one model.

    Args:
        dtype: as vLLM names it; in ``float32`` tokens do not depend on who shares a batch.
        store: with a KV store, as roles have in any case, through which they hand requests over.
    """
    of = KINDS[kind]
    engine = {
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": CONTEXT,
        "max_num_seqs": PLACES,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "dtype": dtype,
    }
    lent = LENT_BLOCKS * block_bytes(dtype)
    lending = {
        NORTH: {"borrow_memory": lent, "lenders": [SOUTH], "patience_ms": 5000},
        SOUTH: {"lend_memory": lent},
    }
    roles = {"prefill": 1, "decode": 1, "local_prompt_tokens": BLOCK_TOKENS}
    models = [
        served(
            name,
            model,
            (of.blocks[name] // of.places() + _PLACEHOLDER) * block_bytes(dtype),
            engine,
            # Its own comes first.
            devices=sorted(DEVICES.values(), key=lambda device: device != own)[: of.places()],
            replicas=of.replicas,
            **({"lending": lending[name]} if of.lends else {}),
            **({"roles": roles} if of.roles else {}),
        )
        for name, own in DEVICES.items()
    ]
    return configuration(
        port,
        *models,
        **({"kvstore": {"memory": "1GiB"}} if store or of.roles else {}),
        rebalancing={
            "controller": "advise",
            "folder": "plans",
            "profile": "devices.yaml",
            "period_s": 4,
            "confirm_periods": 2,
            "settle_s": 8,
            "stale_after_s": 20,
            # A decode step takes 100 to 400 ms here, and a pause about one.
            "pause_budget_ms": 1000,
        },
    )


class Fleet(Platform):
    """A platform whose controller may move work between the two models."""

    @contextlib.contextmanager
    def running(self, start_timeout: float) -> Iterator[None]:
        target = str(self.config.parent / "devices.yaml")
        profile = ["profile", "devices", str(self.config), "--quick", "--out", target]
        # While nothing runs on the devices.
        command = [str(PROGRAMS / "loomserve"), *profile]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with super().running(start_timeout):
            self.wait(
                lambda: all(one["status"] == "ready" for one in self.models().values()),
                start_timeout,
                "all models are ready",
            )
            yield

    def mode(self, mode: str) -> None:
        """Of the controller, ``advise`` or ``auto``."""
        self.put("rebalancing", {"mode": mode})

    def measured(self) -> None:
        """Return once everything is measured that plans need."""
        self.wait(lambda: not self.get("rebalancing")["flaws"], 120, "everything is measured")

    def idle(self) -> None:
        """Return once no plan is carried out."""
        self.wait(lambda: self.get("rebalancing")["running"] is None, 300, "no plan is carried out")

    def lend(self, enabled: bool) -> None:
        """Let one model borrow, without a plan's limits, or bring home what it has borrowed."""
        self.put(f"lending/pairs/{NORTH}/{SOUTH}", {"enabled": enabled})
        self.wait(
            lambda: len(self.get("lending")["loans"]) == int(enabled),
            120,
            "a loan is open" if enabled else "the loan has ended",
        )

    def carry_out(self, action: Mapping[str, Any]) -> None:
        """Make a plan of this action alone and carry it out, while no other is.

        Raises:
            LookupError: it was refused, or ended otherwise.
        """
        self.idle()
        plan = self._accepted("plans", {"actions": [action], "force": True})["plan"]["id"]
        self._accepted(f"plans/{plan}/apply")
        ends = {"done", "failed", "cancelled", "replaced"}
        self.wait(lambda: self.get(f"plans/{plan}")["status"] in ends, 300, f"{plan} has ended")
        found = self.get(f"plans/{plan}")
        if found["status"] != "done":
            raise LookupError(f"{plan} ended as {found['status']}: {found['steps']}")

    def _accepted(self, path: str, body: object = None) -> Any:
        answer = self.post(path, body)
        if answer.is_error:
            raise LookupError(answer.text)
        return answer.json()

    def bring_home(self) -> None:
        """All heads or layers that are with the lender, unless they have come home."""
        self.idle()
        shards = (loan["shard"] for loan in self.get("lending")["loans"] if loan["shard"])
        if (shard := next(shards, None)) is not None:
            first, end = shard["layers"] or (0, 0)
            kind, amount = ("heads", shard["heads"]) if shard["heads"] else ("layers", end - first)
            pair = {"engine": NORTH, "lender": SOUTH}
            pair = {name: self.replicas(model)[0]["id"] for name, model in pair.items()}
            move = {"kind": kind, "amount": amount, "back": True}
            self.carry_out({"action": "move", **pair, **move})

    def one_each(self) -> None:
        """Have one replica of each model, on its own device."""
        self.idle()
        self.measured()
        for model, device in DEVICES.items():
            there = {each["device"]: each["id"] for each in self.replicas(model)}
            if device not in there:
                self.carry_out({"action": "add_replica", "model": model, "device": device})
            for other in there.keys() - {device}:
                self.carry_out({"action": "remove_replica", "engine": there[other]})

        def alone() -> bool:
            return all(
                [each["device"] for each in self.replicas(model)] == [device]
                for model, device in DEVICES.items()
            )

        self.wait(alone, 120, "one replica of each model, on its own core")
        self.measured()

    def actions_done(self, began: float) -> list[dict[str, Any]]:
        """What the controller did since a Unix time, the first first, and how long after it."""
        newest_first = self.get("rebalancing/events?limit=1000")["events"]
        return [
            {"at_s": event["at"] - began, **event["action"], **self._model_of(event)}
            for event in reversed(newest_first)
            if event["at"] >= began and event["kind"] == "done"
        ]

    def _model_of(self, event: Mapping[str, Any]) -> dict[str, str]:
        """Whose replica came or went."""
        if event["action"]["action"] not in ("add_replica", "remove_replica"):
            return {}
        step = self.get(f"plans/{event['plan']}")["steps"][event["step"]]
        return {"model": step["record"]["model"]}


@dataclass(frozen=True)
class Phase:
    """So long, requests a second by model; a model that is not named gets none."""

    seconds: float
    rates: Mapping[str, float]


def load(trace: Sequence[Arrival], phases: Sequence[Phase], seed: str) -> list[Request]:
    """All requests of all phases, by time; each phase and model takes another part of a trace."""
    found: list[Request] = []
    begin = 0.0
    for number, phase in enumerate(phases):
        for model, rate in phase.rates.items():
            part = f"{seed}/{number}/{model}"
            requests = max(2, round(rate * phase.seconds))
            # With token ids, as a chunk may have several tokens.
            found += [
                replace(one, at_s=begin + one.at_s).asked(model, part, ids=True)
                for one in window(trace, requests=requests, rate=rate, seed=part)
            ]
        begin += phase.seconds
    return sorted(found, key=lambda one: one.at_s)

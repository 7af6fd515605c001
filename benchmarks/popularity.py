"""Two models whose popularity shifts: the fleet, its requests, and what a client sees of them.

Each has a core. ``NORTH`` has little KV memory of its own (``OWN_BLOCKS``), ``SOUTH`` more than it
needs but when it is popular itself (``LENDER_BLOCKS``), of which it can lend ``LENT_BLOCKS``. All
kinds of fleets have the same blocks in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from benchmarks.engine import BLOCK_TOKENS, block_bytes
from benchmarks.servers import Server
from benchmarks.workload import (
    Arrival,
    PrefixRequest,
    brief_conversations,
    window,
)
from loomserve.platform.cli.admin_token import token_for

CONTEXT = 256
NORTH, SOUTH = "north", "south"
DEVICES = {NORTH: "core0", SOUTH: "core1"}
OWN_BLOCKS, LENDER_BLOCKS, LENT_BLOCKS = 16, 128, 80
BLOCKS = {NORTH: OWN_BLOCKS, SOUTH: LENDER_BLOCKS}
AMPLE_BLOCKS = 256
"""Of each model in the fleets of :mod:`benchmarks.rebalance_replicas`, for all of its requests."""
PLACES = 32
_PLACEHOLDER = 1
"""A block that vLLM keeps for itself, in every engine."""


@dataclass(frozen=True)
class Phase:
    """So long, requests a second by model; a model that is not named gets none."""

    seconds: float
    rates: Mapping[str, float]


@dataclass(frozen=True)
class Asked:
    """A request to ``model``; ``at_s`` is after the load's begin."""

    model: str
    at_s: float
    request: PrefixRequest


@dataclass
class Answer:
    """What came of it; times in seconds on the loop's clock."""

    asked: Asked
    due: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.due

    @property
    def tpot_s(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.tokens) - 1)


def blocks_of(kind: str, name: str) -> int:
    """KV blocks of each replica of a model."""
    if kind == "alone":
        return AMPLE_BLOCKS
    if kind in ("by_controller", "ample_unified"):
        return AMPLE_BLOCKS // 2
    if kind == "lending":
        return BLOCKS[name]
    if kind.endswith("_even"):
        return sum(BLOCKS.values()) // (2 * len(BLOCKS))
    return BLOCKS[name] // 2


def config(kind: str, model: str, port: int, dtype: str, store: bool = False) -> dict[str, Any]:
    """Of a platform.

    Args:
        kind: ``lending``: each model on its core, and one lends to the other; ``unified`` and
            ``separated``: each has a replica on either core with half of its memory, and both do
            the same, or one prefills and one decodes; ``unified_even``, ``separated_even``: the
            same, with a quarter of all memory for each replica; ``alone``: each model on its core,
            with all the memory that it needs; ``by_controller`` and ``ample_unified``: the same
            memory for two replicas of each, as many as there are or on either core.
        model: a name or folder.
        port: that it listens on.
        dtype: as vLLM names it; in ``float32`` tokens do not depend on who shares a batch.
        store: with a KV store, as roles have in any case, through which they hand requests over.
    """
    engine = {
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": CONTEXT,
        "max_num_seqs": PLACES,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "dtype": dtype,
    }
    lending = kind == "lending"
    one_each = lending or kind == "alone"
    separated = kind.startswith("separated")
    models: list[dict[str, Any]] = []
    for name, device in DEVICES.items():
        # Its own comes first.
        devices = [device, *(each for each in DEVICES.values() if each != device and not one_each)]
        blocks = blocks_of(kind, name) + _PLACEHOLDER
        of: dict[str, Any] = {
            "name": name,
            "source": model,
            "devices": devices,
            "replicas": "auto" if kind == "by_controller" else len(devices),
            "kv_cache_memory": blocks * block_bytes(dtype),
            "engine": engine,
        }
        if lending:
            most = LENT_BLOCKS * block_bytes(dtype)
            of["lending"] = (
                {"borrow_memory": most, "lenders": [SOUTH], "patience_ms": 5000}
                if name == NORTH
                else {"lend_memory": most}
            )
        elif separated:
            of["roles"] = {"prefill": 1, "decode": 1, "local_prompt_tokens": BLOCK_TOKENS}
        models.append(of)
    return {
        "devices": [{"name": f"core{core}", "kind": "cpu", "cores": [core]} for core in range(2)],
        "models": models,
        **({"kvstore": {"memory": "1GiB"}} if store or separated else {}),
        "rebalancing": {
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
        "server": {"host": "127.0.0.1", "port": port},
    }


def _with_token(request: httpx.Request) -> httpx.Request:
    # For each request, since the platform's first start makes the token.
    request.headers["Authorization"] = f"Bearer {token_for(str(request.url))}"
    return request


class Fleet:
    """A running platform and its admin API."""

    def __init__(
        self, kind: str, model: str, port: int, folder: Path, dtype: str, store: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "config.yaml"
        written = config(kind, model, port, dtype, store)
        self.config.write_text(yaml.safe_dump(written, sort_keys=False))
        executable = str(Path(sys.executable).parent / "loomserve")
        self._command = executable
        self.server = Server(
            kind, [executable, "serve", str(self.config)], {}, port, "/ready", folder / "serve.log"
        )
        self.url = f"http://127.0.0.1:{port}"
        self._admin = httpx.Client(base_url=f"{self.url}/admin/v1", timeout=60, auth=_with_token)

    @contextlib.contextmanager
    def running(self, start_timeout: float) -> Iterator[Fleet]:
        try:
            self._profile()
            self.server.start()
            self.server.wait_ready(start_timeout)
            self.wait_ready(start_timeout)
            yield self
        finally:
            self.server.stop()

    def _profile(self) -> None:
        """The devices, while nothing runs there."""
        target = str(self.config.parent / "devices.yaml")
        words = [self._command, "profile", "devices", str(self.config), "--quick", "--out", target]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)

    def wait_ready(self, seconds: float) -> None:
        """Until all models have all replicas.

        Raises:
            TimeoutError: they have not.
        """
        self.wait(
            lambda: all(model["status"] == "ready" for model in self.get("state")["models"]),
            seconds,
            "all models are ready",
        )

    def wait(self, done: Any, seconds: float, what: str) -> None:
        """
        Raises:
            TimeoutError: ``done`` returned nothing true for so long.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError, LookupError):
                if done():
                    return
            time.sleep(1)
        raise TimeoutError(f"not within {seconds:.0f} s: {what}\n{self.server.tail()}")

    def get(self, path: str) -> Any:
        return self._admin.get(path).raise_for_status().json()

    def put(self, path: str, body: object) -> Any:
        return self._admin.put(path, json=body).raise_for_status().json()

    def post(self, path: str, body: object = None) -> httpx.Response:
        return self._admin.post(path, json=body)

    def lend(self, enabled: bool) -> None:
        """Let one model borrow, without a plan's limits, or bring home what it has borrowed."""
        self.put(f"lending/pairs/{NORTH}/{SOUTH}", {"enabled": enabled})
        self.wait(
            lambda: len(self.get("lending")["loans"]) == int(enabled),
            120,
            "a loan is open" if enabled else "the loan has ended",
        )

    def shard_away(self) -> dict[str, Any] | None:
        """The heads or layers that are with the lender."""
        loans = self.get("lending")["loans"]
        return next((loan["shard"] for loan in loans if loan["shard"]), None)

    def idle(self) -> None:
        """Return once no plan is carried out."""
        self.wait(lambda: self.get("rebalancing")["running"] is None, 300, "no plan is carried out")

    def plan(self, move: Mapping[str, Any]) -> str:
        """A plan with this one move between the two models, made while no other is carried out.

        Raises:
            LookupError: it was refused.
        """
        engines = {"engine": self.replica(NORTH)["id"], "lender": self.replica(SOUTH)["id"]}
        return self._plan_of({"action": "move", **engines, **move})

    def _plan_of(self, action: Mapping[str, Any]) -> str:
        self.idle()
        wanted = {"actions": [action], "force": True}
        return str(self._accepted("plans", wanted)["plan"]["id"])

    def apply(self, plan: str) -> None:
        """
        Raises:
            LookupError: it was refused.
        """
        self._accepted(f"plans/{plan}/apply")

    def _accepted(self, path: str, body: object = None) -> Any:
        answer = self.post(path, body)
        if answer.is_error:
            raise LookupError(answer.text)
        return answer.json()

    def ended(self, plan: str, wanted: str) -> None:
        """Return once it has.

        Raises:
            LookupError: it ended otherwise.
        """
        ends = {"done", "failed", "cancelled", "replaced"}
        self.wait(lambda: self.get(f"plans/{plan}")["status"] in ends, 300, f"{plan} has ended")
        found = self.get(f"plans/{plan}")
        if found["status"] != wanted:
            raise LookupError(f"{plan} ended as {found['status']}: {found['steps']}")

    def carry_out(self, move: Mapping[str, Any]) -> None:
        self._carry_out(self.plan(move))

    def _carry_out(self, plan: str) -> None:
        self.apply(plan)
        self.ended(plan, "done")

    def remove(self, model: str, device: str) -> None:
        """End a model's replica on this device.

        Raises:
            LookupError: it did not end.
        """
        (leaving,) = (each["id"] for each in self.replicas(model) if each["device"] == device)
        self._carry_out(self._plan_of({"action": "remove_replica", "engine": leaving}))

    def add(self, model: str, device: str) -> None:
        """Start a replica of a model on this device.

        Raises:
            LookupError: it did not start.
        """
        self._carry_out(self._plan_of({"action": "add_replica", "model": model, "device": device}))

    def bring_home(self) -> None:
        """All that is with the lender, unless it has come home by itself."""
        self.idle()
        if (shard := self.shard_away()) is not None:
            first, end = shard["layers"] or (0, 0)
            kind, amount = ("heads", shard["heads"]) if shard["heads"] else ("layers", end - first)
            self.carry_out({"kind": kind, "amount": amount, "back": True})

    def mode(self, mode: str) -> None:
        self.put("rebalancing", {"mode": mode})

    def loads(self) -> dict[str, float]:
        """Utilisation by device; empty while it is not known."""
        devices = self.get("rebalancing")["devices"]
        return {each["device"]: each["compute"] + each["memory"] for each in devices}

    def events(self, since: float) -> list[dict[str, Any]]:
        """Of the controller after a Unix time, the oldest first."""
        newest_first = self.get("rebalancing/events?limit=1000")["events"]
        return [event for event in reversed(newest_first) if event["at"] >= since]

    def replica(self, model: str) -> dict[str, Any]:
        """The state of a model's only replica.

        Raises:
            LookupError: there is none now.
        """
        for each in self.replicas(model):
            return each
        raise LookupError(f"{model} has no replica")

    def replicas(self, model: str) -> list[dict[str, Any]]:
        """The states of a model's replicas, of which there are none if it is not served."""
        for each in self.get("state")["models"]:
            if each["name"] == model:
                return list(each["replicas"])
        return []


def arrivals(trace: Path | None) -> list[Arrival]:
    return brief_conversations(trace, CONTEXT, requests=4000)


def load(trace: Sequence[Arrival], phases: Sequence[Phase], seed: str) -> list[Asked]:
    """All requests of all phases, by time; each phase and model takes another part of a trace."""
    found: list[Asked] = []
    begin = 0.0
    for number, phase in enumerate(phases):
        for model, rate in phase.rates.items():
            of = window(
                trace,
                requests=max(2, round(rate * phase.seconds)),
                rate=rate,
                seed=f"{seed}/{number}/{model}",
            )
            found += [Asked(model, begin + each.at_s, each) for each in of]
        begin += phase.seconds
    return sorted(found, key=lambda one: one.at_s)


async def ask(
    client: openai.AsyncOpenAI, asked: Asked, place: int, seed: str, due: float
) -> Answer:
    """Send the request that has this place in its load, and read its stream to the end."""
    answer = Answer(asked, due)
    try:
        stream = await client.completions.create(
            model=asked.model,
            prompt=asked.request.prompt(f"{seed}/{place}"),
            max_tokens=asked.request.output_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                ids = (choice.model_extra or {}).get("token_ids") or []
                answer.tokens += ids
                answer.times += [time.perf_counter()] * len(ids)
    except openai.OpenAIError as error:
        answer.error = repr(error)
    if answer.error is None and len(answer.tokens) != asked.request.output_tokens:
        answer.error = f"{len(answer.tokens)} of {asked.request.output_tokens} tokens came"
    return answer


def client(url: str, key: str = "-") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=1200)


async def serve(url: str, all_: Sequence[Asked], seed: str, begin: float) -> list[Answer]:
    """Send every request when it is due, whether or not earlier ones have ended."""
    async with client(url) as of:

        async def one(place: int, asked: Asked) -> Answer:
            due = begin + asked.at_s
            await asyncio.sleep(due - time.perf_counter())
            return await ask(of, asked, place, seed, due)

        return await asyncio.gather(*(one(*each) for each in enumerate(all_)))


async def replay(url: str, all_: Sequence[Asked], seed: str, at_once: int) -> list[Answer]:
    """Send the same requests, so many at a time, without waiting for when they are due."""
    turn = asyncio.Semaphore(at_once)
    async with client(url) as of:

        async def one(place: int, asked: Asked) -> Answer:
            async with turn:
                return await ask(of, asked, place, seed, time.perf_counter())

        return await asyncio.gather(*(one(*each) for each in enumerate(all_)))

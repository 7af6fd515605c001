"""A platform of the real code in this process, with two simulated engines; of the other models
replicas seem to report what tests say."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

# It imports vLLM, for which a platform that has started would stand still.
import loomserve.deployments.gateway.request_dispatcher  # noqa: F401
from loomserve.deployments.apps import run_platform
from loomserve.deployments.kvstore.kv_store import store_plan
from loomserve.kvstore.server.actor import StoreActor
from loomserve.platform.access.keys import hash_key
from loomserve.platform.config import Config, parse
from loomserve.platform.fleet import registry
from loomserve.platform.fleet.messages import FrontEndSpec, Heartbeat
from loomserve.platform.models import simulated
from loomserve.platform.run.folder import RUN_VARIABLE
from loomserve.platform.state import (
    FootprintState,
    LentState,
    Pace,
    ReplicaLoad,
    SchedulingState,
    ShardState,
    SlicingState,
    WorkState,
)
from tests.peft_folders import write_adapter
from tests.unit.contracts.one_process import OneProcessServe
from tests.unit.deployments.kvstore.test_admin import write
from tests.unit.loggers import loggers_as_they_were
from tests.unit.platform.fleet.heartbeats import borrowing, loan, report
from tests.waiting import PATIENCE_S, within

ADMIN, ALICE = "sk-admin", "sk-alice"
_LAYER = "model.layers.0.self_attn"
_OF_ADAPTER = {f"{_LAYER}.q_proj.weight": (576, 576), f"{_LAYER}.v_proj.weight": (192, 576)}


def _config(folder: Path, port: int) -> dict[str, Any]:
    paper = str(folder / "paper")
    simulated = {"step_ms": 10, "token_ms": 0.01, "seed": 1, "answer_tokens": 8}
    return {
        "devices": [{"name": f"core{n}", "cores": [n]} for n in range(4)],
        "models": [
            {"name": "chat", "source": "simulated", "devices": ["core0"], "simulated": simulated,
             "engine": {"max_model_len": 2048, "max_num_seqs": 8},
             "adapters": {"load": [{"name": "chat-sql", "source": str(folder / "sql")}]}},
            {"name": "mail", "source": "simulated", "devices": ["core1"], "simulated": simulated,
             "engine": {"max_model_len": 2048},
             "idle": {"sleep_after_s": 36000, "unload_after_s": 72000}},
            {"name": "org/hot", "source": paper, "devices": ["core2"],
             "lending": {"borrow_memory": "1GiB"}},
            {"name": "org/cold", "source": paper, "devices": ["core2", "core3"], "replicas": 2,
             "lending": {"lend_memory": "1MiB"}, "router": {"policy": "round_robin"}},
        ],
        "aliases": {"assistant": {"models": {"chat": 95, "mail": 5}, "sticky": "key"}},
        "kvstore": {"memory": "64MiB"},
        "batch": {},
        "server": {
            "port": port,
            "admin_token_hash": hash_key(ADMIN),
            "api_keys": [
                {"name": "alice", "hash": hash_key(ALICE), "requests_per_minute": 60_000,
                 "tokens_per_day": 1000000},
                {"name": "bob", "hash": hash_key("sk-bob"), "models": ["chat"],
                 "expires_at": "2031-05-01T00:00:00Z", "max_concurrent": 2},
            ],
        },
    }  # fmt: skip


class WholePlatform:
    """What tests ask of it."""

    def __init__(self, controller: Any, port: int, folder: Path, reports: list[Heartbeat]) -> None:
        self._controller, self._reports = controller, reports
        self.port, self.folder = port, folder
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: Any = None, key: str = ALICE, **more: Any) -> Any:
        """The answer's status and body: JSON, text, or the events of a stream."""
        sent = {"authorization": f"Bearer {key}"} if key else {}
        headers = sent | more.pop("headers", {})
        answer = self.http.request(method, path, json=body, headers=headers, **more)
        kind = answer.headers.get("content-type", "")
        found: Any = answer.text
        if kind.startswith("application/json"):
            found = answer.json()
        elif kind.startswith("text/event-stream"):
            found = [_event(each) for each in answer.text.split("\n\n") if each]
        return {"status": answer.status_code, "body": found}

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        return self.ask(method, f"/admin/v1{path}", body, ADMIN)

    def hear(self) -> None:
        """Take in what replicas of models without an engine report."""
        for each in self._reports:
            self._controller.report.remote(each).result(PATIENCE_S)

    def is_ready(self) -> bool:
        self.hear()
        return self.ask("GET", "/ready")["status"] == 200


def _event(text: str) -> dict[str, Any]:
    event = {}
    for line in text.splitlines():
        name, _, value = line.partition(": ")
        event[name] = json.loads(value) if value.startswith(("{", "[{")) else value
    return event


def _write_paper_model(folder: Path) -> None:
    """A folder of a model of which no engine is started."""
    folder.mkdir()
    for file in simulated.fetch().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.pop(simulated.MARK)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def _reports(config: Config, folder: Path) -> list[Heartbeat]:
    """Of a borrower, and of two replicas of its lender."""
    hot, cold = (
        next(one for one in config.models if one.name == name) for name in ("org/hot", "org/cold")
    )
    load = ReplicaLoad(
        running=3, waiting=2, kv_cache_usage=0.5, step_time_s=0.03125, oldest_waiting_s=1.5,
        weighted_turnaround=2.25,
        pace=Pace(prefill_token_s=0.125, output_token_s=0.25, request_s=4),
        scheduling=SchedulingState(
            queue="fcfs", preemption="recompute", swapped_out=3, swapped_in=2, recomputed=1,
            swap_used_bytes=0, swap_capacity_bytes=0, step_time_error=0.25, swap_time_error=None,
        ),
        work=WorkState(prefill_s=1, attention_s=2, linear_s=3, tokens=4096), requests=17,
        measured_at=0,
    )  # fmt: skip
    size = FootprintState(
        layers=30, layer_bytes=2**20, kv_heads=3, block_bytes=2**18, block_tokens=16,
        memory_bytes=2**30, memory_measured_at=0, start_s=8, ready_at=0,
    )  # fmt: skip
    loans = (
        loan("c0", "loan-0").model_copy(
            update={"shard": ShardState(heads=1, phase="away", pause_s=0.25, copied_bytes=4096)}
        ),
    )
    lent = LentState(
        name="loan-0", lender="org/cold", lender_replica="c0", borrower="org/hot", blocks=4,
        most_blocks=8, taken_back_blocks=1, tasks=9, wait_us=1.5, service_us=2.5,
        slicing={"decode": SlicingState(slices={"mlp": 2}, wait_whole_us=8, wait_us=4)},
    )  # fmt: skip
    on = FrontEndSpec(path=str(folder / "paper"), engine_options={})
    of_hot = borrowing(*loans, broken={"DIED": 1}, problems={"org/cold": "it has no memory left"})
    common = {"load": load, "footprint": size, "front_end": on, "max_model_len": 4096,
              "in_flight": 5}  # fmt: skip
    return [
        report("h0", "core2", model=hot, borrowing=of_hot.borrowing, **common),
        report("c0", "core2", model=cold, lent=(lent,), **common),
        report("c1", "core3", model=cold, **common),
    ]


@contextmanager
def whole_platform(folder: Path, run: Path) -> Iterator[WholePlatform]:
    environment, patches = dict(os.environ), pytest.MonkeyPatch()
    # However long a busy machine has replicas wait for a core.
    patches.setattr(registry, "HEARTBEAT_EXPIRES_S", 10 * PATIENCE_S)
    os.environ |= {RUN_VARIABLE: str(run), "LOOMSERVE_HOME": str(folder / "home")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _write_paper_model(folder / "paper")
    write_adapter(folder / "sql", _OF_ADAPTER, seed=1, rank=4)
    config = parse(json.dumps(_config(folder, port)))
    plan = store_plan(config, folder)
    assert plan is not None
    options = plan.here()
    store = StoreActor(options.model_dump(mode="json"))
    assert store.problem() is None
    write(options, "org/hot")
    try:
        with (
            loggers_as_they_were(),
            OneProcessServe(folder, starts=lambda app: not app.startswith("model:org")),
        ):
            replicas = {model.name: 1 for model in config.models} | {"org/cold": 2}
            controller = run_platform(config, replicas, "internal", str(folder), options, {})
            platform = WholePlatform(controller, port, folder, _reports(config, folder))
            within(180, platform.is_ready)
            yield platform
            platform.http.close()
    finally:
        store.stop()
        patches.undo()
        os.environ.clear()
        os.environ |= environment

"""Fleets and heartbeats that tests are made of."""

from __future__ import annotations

from typing import Any

from loomserve.platform.config import Device, Model
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import FrontEndSpec, Heartbeat
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state import (
    BorrowingState,
    FootprintState,
    LoanState,
    ModelStatus,
    ReplicaLoad,
)
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats

FRONT_END = FrontEndSpec(path="demo", engine_options={})
DEVICES = (Device(name="core0", cores=(0,)), Device(name="core1", cores=(1,)))
MODEL = Model(name="org/m", source="demo", devices=("core0", "core1"))


def served_model(name: str = "m", most: int = 9, **changes: Any) -> Model:
    """One that keeps nothing in a KV store, and takes so many sequences at once."""
    given = {"source": "demo", "devices": ("core0",), "kvstore": False, **changes}
    return Model(name=name, max_concurrent_requests=most, **given)


def fleet(target: int = 2) -> Fleet:
    made = Fleet(DEVICES, drain_timeout_s=60)
    made.registry.add(MODEL, target)
    return made


def report(replica: str = "r0", device: str = "core0", **changes: object) -> Heartbeat:
    load = ReplicaLoad(running=0, waiting=0, kv_cache_usage=0, step_time_s=0, measured_at=0)
    values = {
        "model": MODEL, "replica_id": replica, "device": device, "address": "engine-1.127.0.0.1",
        "pid": 1, "engine_pid": 2, "max_model_len": 64, "in_flight": 0,
        "engine": EngineAddress(f"ipc://{replica}.in", f"ipc://{replica}.out"),
        "front_end": FRONT_END,
    }  # fmt: skip
    stats = {"load": load, "max_running": 8, "kv_capacity_tokens": 64, "draining": False,
             "role": Role.UNIFIED, "told_at": 0.0}  # fmt: skip
    stats |= {name: changes.pop(name) for name in (*stats, "load") if name in changes}
    return Heartbeat(**{**values, **changes}, stats=RoutingStats(**stats))


def footprint(**changes: object) -> FootprintState:
    values = {"layers": 1, "layer_bytes": 1, "kv_heads": 1, "block_bytes": 1, "block_tokens": 1,
              "memory_bytes": 1, "memory_measured_at": 0.0, "start_s": 5.0,
              "ready_at": 0.0}  # fmt: skip
    return FootprintState.model_validate({**values, **changes})


def status(of: Fleet, now: float) -> ModelStatus:
    return of.views.models(now)[0].status


HOT = Model(name="org/hot", source="demo", devices=("core0",), lending={"borrow_memory": 2**30})
COLD = Model(
    name="org/cold", source="demo", devices=("core0", "core1"), lending={"lend_memory": 2**20}
)


def lending_fleet() -> Fleet:
    """A borrower on core0 beside one lender's replica, whose other one is on core1."""
    some = Fleet(DEVICES, drain_timeout_s=60)
    for model in (HOT, COLD):
        some.registry.add(model, 1)
    some.report(report("c0", "core0", model=COLD, address="engine-10.127.0.0.1"), 0)
    some.report(report("c1", "core1", model=COLD, address="engine-11.127.0.0.1"), 0)
    return some


def loan(lender_replica: str, name: str = "loan-1", borrower_replica: str = "h0") -> LoanState:
    return LoanState(
        name=name, borrower=HOT.name, borrower_replica=borrower_replica, lender=COLD.name,
        lender_replica=lender_replica, draining=False, phase="open", most_tokens=9, age_s=1,
        usable_blocks=4, free_blocks=1, requests=1, tasks=1,
        wait_mean_us=1, wait_max_us=1, wait_share=0.1, service_share=0.1,
    )  # fmt: skip


def borrowing(*loans: LoanState, **changes: object) -> Heartbeat:
    values: dict[str, object] = {"own_blocks": 8, "own_free_blocks": 1, "broken": {},
                                 "problems": {}, "switched_off": ()}  # fmt: skip
    state = BorrowingState.model_validate({**values, **changes, "loans": loans})
    return report("h0", "core0", model=HOT, address="engine-20.127.0.0.1", borrowing=state)


def lenders(of: Fleet, now: float, *loans: LoanState) -> list[str]:
    return [lender.id for lender in of.report(borrowing(*loans), now).lenders]

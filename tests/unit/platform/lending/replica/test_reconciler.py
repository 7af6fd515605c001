"""A borrower's loans, kept with an engine that only answers, and a lender that is a real server."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from loomserve.platform.fleet.messages import (
    INTERNAL_TOKEN_HEADER,
    LOANS_PATH,
    DesiredState,
    LenderReplica,
)
from loomserve.platform.lending.engine.scheduling.calls import EngineLoanCalls
from loomserve.platform.lending.messages import LendRequest
from loomserve.platform.lending.metrics import LendingMetrics
from loomserve.platform.lending.replica.reconciler import LoanReconciler, remove_left_rings
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.run.sockets import listen_locally
from loomserve.platform.state.roles import Role

pytestmark = pytest.mark.anyio
NOWHERE = "nowhere.127.0.0.1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Hot:
    """Answers as a borrower's engine does."""

    loans: dict[int, dict[str, Any]] = field(default_factory=dict)
    limits: dict[int, int | None] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)
    full: bool = False
    broken: dict[str, int] = field(default_factory=dict)

    async def call(self, name: str, *given: Any) -> Any:
        self.called.append(name)
        inspect.signature(getattr(EngineLoanCalls, name)).bind(self, *given)
        return getattr(self, name)(*given)

    def borrowing(self, shard: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "geometry": str(shard), "blocks": 8, "least": 1, "max_tokens": 64, "max_requests": 4,
            "max_blocks": 16,
        }  # fmt: skip

    def borrow(self, name: str, ring: str, shard: dict[str, Any] | None) -> int:
        if self.full:
            raise Exception("no side is free")  # as vLLM does
        partition = len(self.called)
        self.loans[partition] = {
            "name": name, "partition": partition, "usable_blocks": 8, "free_blocks": 5,
            "requests": 2, "open": True, "phase": "open", "most_tokens": 99, "tasks": 10,
            "post_ns": 100, "wait_ns": 2_000_000, "wait_max_ns": 900_000,
            "pickup_ns": 50_000, "service_ns": 4_000_000,
            "shard": {"phase": "leaving", "pause_s": 0.0, "copied_bytes": 0} if shard else None,
        }  # fmt: skip
        return partition

    def drain_loan(self, partition: int) -> bool:
        self.loans[partition]["open"] = False
        if shard := self.loans[partition]["shard"]:
            was = shard["phase"]
            shard["phase"] = "home" if was == "returning" else "returning"
            return bool(was == "returning")
        return not self.loans[partition]["requests"]

    def limit_loan(self, partition: int, most_bytes: int | None) -> None:
        self.limits[partition] = most_bytes

    def end_loan(self, partition: int) -> None:
        self.loans.pop(partition, None)

    def loan_state(self) -> dict[str, Any]:
        return {
            "own_blocks": 20, "own_free_blocks": 3, "moved": 0, "broken": self.broken,
            "loans": list(self.loans.values()),
        }  # fmt: skip

    def breaks(self) -> None:
        self.loans.clear()
        self.broken["TIMED_OUT"] = self.broken.get("TIMED_OUT", 0) + 1


@dataclass
class Cold:
    """A lender's port."""

    address: str = ""
    lent: dict[str, LendRequest] = field(default_factory=dict)
    opened: int = 0
    refusal: str | None = None

    async def lend(self, request: web.Request) -> web.Response:
        assert request.headers[INTERNAL_TOKEN_HEADER] == "secret"
        if self.refusal is not None:
            return web.json_response({"error": {"message": self.refusal}}, status=409)
        asked = LendRequest.model_validate_json(await request.read())
        open(asked.ring, "x").close()  # noqa: ASYNC230
        self.lent[asked.name] = asked
        self.opened += 1
        return web.json_response({"blocks": 8})

    async def end(self, request: web.Request) -> web.Response:
        assert request.headers[INTERNAL_TOKEN_HEADER] == "secret"
        self.lent.pop(request.match_info["name"], None)
        return web.json_response({})


@asynccontextmanager
async def listening(cold: Cold) -> AsyncIterator[Cold]:
    app = web.Application()
    app.router.add_post(LOANS_PATH, cold.lend)
    app.router.add_delete(LOANS_PATH + "/{name}", cold.end)
    runner = web.AppRunner(app)
    await runner.setup()
    sock, cold.address = listen_locally("cold", "127.0.0.1")
    await web.SockSite(runner, sock).start()
    try:
        yield cold
    finally:
        await runner.cleanup()


@asynccontextmanager
async def reconciling(
    hot: Hot, folder: Path, most: int = 1, quiet: bool = False
) -> AsyncIterator[LoanReconciler]:
    reconciler = LoanReconciler(
        hot.call, LendingMetrics(CollectorRegistry()), model="hot", replica_id="h0", most=most,
        internal_token="secret", drain_timeout_s=30, quiet=quiet, folder=folder,
    )  # fmt: skip
    try:
        yield reconciler
    finally:
        await reconciler.close()


def desired(
    *lenders: LenderReplica,
    off: Iterable[str] = (),
    drain: Iterable[str] = (),
    limits: dict[str, int] | None = None,
    shards: dict[str, dict[str, Any]] | None = None,
) -> DesiredState:
    return DesiredState(
        draining=False, stop_timeout_s=60, role=Role.UNIFIED, peers=(), lenders=lenders,
        lenders_off=tuple(off), drain_loans=tuple(drain), lender_limits=limits or {},
        shards=shards or {},
    )  # fmt: skip


def lender(cold: Cold, name: str = "cold") -> LenderReplica:
    return LenderReplica(model=name, id=f"{name}-0", address=cold.address or NOWHERE)


def rings(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith("loomserve-ring-")]


async def test_a_loan_is_opened_once_and_shown(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        await reconciler.reconcile(0)
        assert not hot.called
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        await reconciler.reconcile(10)
        assert cold.opened == 1
        (asked,) = cold.lent.values()
        assert (asked.borrower, asked.engine.blocks) == ("hot", 8)
        assert reconciler.state is not None
        (loan,) = reconciler.state.loans
        assert (loan.name, loan.lender, loan.lender_replica) == (asked.name, "cold", "cold-0")
        assert (loan.borrower, loan.borrower_replica, loan.age_s) == ("hot", "h0", 10)
        assert (loan.wait_mean_us, loan.wait_max_us) == (200, 900)
        assert (loan.wait_share, loan.service_share) == pytest.approx((2e-4, 4e-4))
        assert rings(tmp_path)
    assert not cold.lent
    assert not hot.loans
    assert not rings(tmp_path)


async def test_an_engine_without_loans_is_left_alone_if_none_is_to_be(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path, quiet=True) as reconciler:
        reconciler.apply(desired())
        await reconciler.reconcile(0)
        assert reconciler.state is not None
        asked = len(hot.called)
        await reconciler.reconcile(1)
        assert len(hot.called) == asked
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(2)
        assert reconciler.state.loans
        assert len(hot.called) > asked


async def test_a_loan_with_a_lender_that_is_switched_off_ends_when_no_request_is_left(
    tmp_path: Path,
) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        reconciler.apply(desired(off=["cold"]))
        await reconciler.reconcile(1)
        assert reconciler.state is not None
        assert [loan.draining for loan in reconciler.state.loans] == [True]
        assert reconciler.state.switched_off == ("cold",)
        assert "end_loan" not in hot.called
        next(iter(hot.loans.values()))["requests"] = 0
        await reconciler.reconcile(2)
        assert not hot.loans
        assert not cold.lent
        assert not rings(tmp_path)
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(3)
        assert cold.opened == 2


async def test_the_engine_is_told_a_limit_once_and_at_the_opening_of_a_loan(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        for limit in (300, 300, None):
            reconciler.apply(desired(lender(cold), limits={"cold": limit} if limit else None))
            await reconciler.reconcile(0)
            assert [hot.limits[partition] for partition in hot.loans] == [limit]
        assert hot.called.count("limit_loan") == 2
        assert hot.called.index("limit_loan") == hot.called.index("borrow") + 1


async def test_a_limit_of_nothing_drains_the_loan_and_opens_none(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        reconciler.apply(desired(lender(cold), limits={"cold": 0}))
        await reconciler.reconcile(1)
        assert reconciler.state is not None
        assert [loan.draining for loan in reconciler.state.loans] == [True]
        next(iter(hot.loans.values()))["requests"] = 0
        for now in (2, 200):
            await reconciler.reconcile(now)
            assert not hot.loans
        assert reconciler.state.limits == {"cold": 0}
        assert cold.opened == 1


async def test_a_part_is_lent_in_place_of_requests_and_comes_home_before_they_are_again(
    tmp_path: Path,
) -> None:
    hot, heads = Hot(), {"cold": {"heads": 1}}
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        lender = LenderReplica(model="cold", id="c0", address=cold.address)
        reconciler.apply(desired(lender))
        await reconciler.reconcile(0)
        (whole,) = hot.loans.values()
        whole["requests"] = 0
        reconciler.apply(desired(lender, shards=heads))
        await reconciler.reconcile(1)
        assert [asked.engine.geometry for asked in cold.lent.values()] == [str(heads["cold"])]
        assert reconciler.state is not None
        (loan,) = reconciler.state.loans
        assert loan.shard is not None
        assert (loan.shard.heads, loan.shard.phase) == (1, "leaving")
        assert reconciler.state.shards == heads

        reconciler.apply(desired(lender))
        await reconciler.reconcile(2)
        assert [loan["shard"]["phase"] for loan in hot.loans.values()] == ["returning"]
        await reconciler.reconcile(3)
        assert [asked.engine.geometry for asked in cold.lent.values()] == ["None"]
        assert [loan["shard"] for loan in hot.loans.values()] == [None]


async def test_a_part_that_came_home_by_itself_is_lent_again_after_a_backoff(
    tmp_path: Path,
) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        lender = LenderReplica(model="cold", id="c0", address=cold.address)
        reconciler.apply(desired(lender, shards={"cold": {"layers": [1, 2]}}))
        await reconciler.reconcile(0)
        (loan,) = hot.loans.values()
        loan["shard"] |= {"phase": "home", "why": "its lender was too slow"}
        await reconciler.reconcile(0.5)
        assert not hot.loans
        assert not cold.lent
        assert reconciler.state is not None
        assert "came home, since its lender was too slow" in reconciler.state.problems["cold"]
        await reconciler.reconcile(5)
        assert len(cold.lent) == 1


async def test_a_loan_that_does_not_empty_is_ended_after_the_timeout(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        reconciler.apply(desired(off=["cold"]))
        await reconciler.reconcile(1)
        await reconciler.reconcile(30)
        assert hot.loans
        await reconciler.reconcile(31)
        assert not hot.loans


async def test_a_controller_that_has_not_heard_of_a_lender_yet_ends_no_loan(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        for _ in range(2):
            reconciler.apply(desired())
            await reconciler.reconcile(1)
        assert "drain_loan" not in hot.called
        reconciler.apply(desired(lender(cold)))
        reconciler.apply(desired())
        await reconciler.reconcile(2)
        assert "drain_loan" not in hot.called
        for _ in range(2):
            reconciler.apply(desired())
        await reconciler.reconcile(3)
        assert "drain_loan" in hot.called


async def test_an_operator_that_drains_a_loan_has_a_minute_without_it(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        (name,) = cold.lent
        next(iter(hot.loans.values()))["requests"] = 0
        reconciler.apply(desired(lender(cold), drain=[name]))
        await reconciler.reconcile(1)
        assert not hot.loans
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(60)
        assert cold.opened == 1
        await reconciler.reconcile(61)
        assert cold.opened == 2


async def test_a_loan_that_broke_is_given_back_and_opened_anew_under_another_name(
    tmp_path: Path,
) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        (first,), (ring,) = cold.lent, rings(tmp_path)
        hot.breaks()
        await reconciler.reconcile(5)
        assert not cold.lent
        assert not ring.exists()
        assert hot.called.count("end_loan") == 1
        assert reconciler.state is not None
        assert reconciler.state.broken == {"TIMED_OUT": 1}
        assert "after 5 s" in reconciler.state.problems["cold"]
        await reconciler.reconcile(6)
        (second,) = cold.lent
        assert second != first
        assert rings(tmp_path) != [ring]
        assert not reconciler.state.problems


async def opening_times(hot: Hot, cold: Cold, reconciler: LoanReconciler, until: int) -> list[int]:
    """The seconds at which the lender was asked, if loans break within a second."""
    times = []
    for now in range(until):
        before = cold.opened
        await reconciler.reconcile(now)
        if cold.opened > before:
            times.append(now)
            hot.breaks()
    return times


async def test_the_backoff_doubles_to_a_minute_and_is_forgotten_after_a_long_loan(
    tmp_path: Path,
) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        times = await opening_times(hot, cold, reconciler, 300)
        # Each loan is seen to be broken a second after it was opened.
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert gaps == [2, 3, 5, 9, 17, 33, 61, 61, 61]
        while not hot.loans:
            await reconciler.reconcile(times[-1] + 100)
        hot.breaks()
        await reconciler.reconcile(times[-1] + 170)
        await reconciler.reconcile(times[-1] + 171)
        assert cold.lent


async def test_a_lender_that_refuses_is_asked_again_later_and_its_reason_shown(
    tmp_path: Path,
) -> None:
    hot = Hot()
    cold = Cold(refusal="nothing is left to lend")
    async with listening(cold), reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        assert reconciler.state is not None
        assert reconciler.state.problems == {"cold": "nothing is left to lend"}
        cold.refusal = None
        await reconciler.reconcile(0.9)
        assert not cold.lent
        await reconciler.reconcile(1)
        assert cold.lent


async def test_what_the_borrowers_engine_refuses_is_given_back(tmp_path: Path) -> None:
    hot = Hot(full=True)
    async with listening(Cold()) as cold, reconciling(hot, tmp_path) as reconciler:
        reconciler.apply(desired(lender(cold)))
        await reconciler.reconcile(0)
        assert cold.opened == 1
        assert not cold.lent
        assert not rings(tmp_path)
        assert reconciler.state is not None
        assert reconciler.state.problems == {"cold": "no side is free"}


async def test_a_lender_that_is_away_does_not_keep_others_from_lending(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path, most=2) as reconciler:
        away = LenderReplica(model="away", id="away-0", address=NOWHERE)
        reconciler.apply(desired(away, lender(cold)))
        await reconciler.reconcile(0)
        assert len(cold.lent) == 1


async def test_no_more_loans_are_opened_than_the_engine_has_room_for(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, reconciling(hot, tmp_path, most=2) as reconciler:
        reconciler.apply(desired(*(lender(cold, name) for name in ("a", "b", "c"))))
        await reconciler.reconcile(0)
        await reconciler.reconcile(1)
        assert reconciler.state is not None
        assert [loan.lender for loan in reconciler.state.loans] == ["a", "b"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["break", "off", "on", "refuse", "lend", "leave"]), max_size=20))
async def test_whatever_happens_both_sides_know_of_the_same_loans(
    tmp_path_factory: pytest.TempPathFactory, events: list[str]
) -> None:
    hot, folder = Hot(), tmp_path_factory.mktemp("rings")
    async with listening(Cold()) as cold, reconciling(hot, folder) as reconciler:
        told = desired(lender(cold))
        for now, event in enumerate(events):
            if event == "break":
                hot.breaks()
            elif event == "leave":
                for loan in hot.loans.values():
                    loan["requests"] = 0
            elif event in {"on", "off"}:
                told = desired(lender(cold)) if event == "on" else desired(off=["cold"])
            else:
                cold.refusal = "no" if event == "refuse" else None
            reconciler.apply(told)
            await reconciler.reconcile(now)
            names = {loan["name"] for loan in hot.loans.values()}
            assert reconciler.state is not None
            assert names == set(cold.lent) == {loan.name for loan in reconciler.state.loans}
            assert len(rings(folder)) == len(names) <= 1


def test_rings_of_processes_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    alive = tmp_path / f"loomserve-ring-{os.getpid()}-aa"
    gone = tmp_path / "loomserve-ring-4194999-bb"  # above the kernel's largest pid
    other = tmp_path / "psm_1"
    for path in (alive, gone, other):
        path.touch()
    remove_left_rings(tmp_path)
    assert set(tmp_path.iterdir()) == {alive, other}


def test_a_ring_that_a_process_maps_stays_though_its_makers_pid_is_not_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "loomserve-ring-4194999-cc"
    geometry = Geometry(1, 2, 1, 8, 16, "float32", 1.0, "vec")
    ring = LentRing.create(path, geometry, 4, 2, 2)
    remove_left_rings(tmp_path)
    assert set(tmp_path.iterdir()) == {path, path.with_name(f"{path.name}.lender")}
    borrower = Ring.attach(path)
    del ring
    gc.collect()
    remove_left_rings(tmp_path)
    assert set(tmp_path.iterdir()) == {path}
    del borrower
    gc.collect()
    remove_left_rings(tmp_path)
    assert list(tmp_path.iterdir()) == []

"""A borrower's loans, kept with an engine that only answers, and a lender that is a real server."""

from __future__ import annotations

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

from loomserve.platform.fleet.messages import (
    INTERNAL_TOKEN_HEADER,
    LOANS_PATH,
    EngineOrders,
    LenderReplica,
    LoanRequest,
)
from loomserve.platform.lending.replica.reconciler import LoanKeeper, remove_left_rings
from loomserve.platform.state.roles import Role

pytestmark = pytest.mark.anyio
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Hot:
    """Answers as a borrower's engine does."""

    loans: dict[int, dict[str, Any]] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)
    full: bool = False
    broken: dict[str, int] = field(default_factory=dict)

    async def call(self, name: str, *given: Any) -> Any:
        self.called.append(name)
        return getattr(self, name)(*given)

    def borrowing(self, part: dict[str, Any] | None) -> dict[str, Any]:
        return {"geometry": "{}", "blocks": 8, "of": part}

    def borrow(self, name: str, ring: str, part: dict[str, Any] | None) -> int:
        if self.full:
            raise Exception("no side is free")  # as vLLM does
        side = len(self.called)
        self.loans[side] = {
            "name": name, "side": side, "usable_blocks": 8, "free_blocks": 5, "requests": 2,
            "open": True, "phase": "open", "most_tokens": 99, "tasks": 10,
            "post_ns": 100, "wait_ns": 2_000_000, "wait_max_ns": 900_000,
            "service_ns": 4_000_000, "ring": ring,
            "part": {"phase": "leaving", "pause_s": 0.0, "copied_bytes": 0} if part else None,
        }  # fmt: skip
        return side

    def drain_loan(self, side: int) -> bool:
        self.loans[side]["open"] = False
        if part := self.loans[side]["part"]:
            was, part["phase"] = (
                part["phase"],
                "home" if part["phase"] == "returning" else "returning",
            )
            return bool(was == "returning")
        return not self.loans[side]["requests"]

    def limit_loan(self, side: int, most_bytes: int | None) -> None:
        self.loans[side]["most_bytes"] = most_bytes

    def end_loan(self, side: int) -> None:
        self.loans.pop(side, None)

    def loan_state(self) -> dict[str, Any]:
        return {
            "own_blocks": 20, "own_free": 3, "moved": 0, "broken": self.broken,
            "loans": list(self.loans.values()),
        }  # fmt: skip

    def breaks(self) -> None:
        self.loans.clear()
        self.broken["TIMED_OUT"] = self.broken.get("TIMED_OUT", 0) + 1


@dataclass
class Cold:
    """A lender's port."""

    address: str = ""
    lent: dict[str, LoanRequest] = field(default_factory=dict)
    opened: int = 0
    refusal: str | None = None

    async def lend(self, request: web.Request) -> web.Response:
        assert request.headers[INTERNAL_TOKEN_HEADER] == "secret"
        if self.refusal is not None:
            return web.json_response({"error": {"message": self.refusal}}, status=409)
        asked = LoanRequest.model_validate_json(await request.read())
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
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    cold.address = f"{host}:{port}"
    try:
        yield cold
    finally:
        await runner.cleanup()


@asynccontextmanager
async def keeping(hot: Hot, folder: Path, most: int = 1) -> AsyncIterator[LoanKeeper]:
    keeper = LoanKeeper(
        hot.call, model="hot", replica_id="h0", most=most, internal_token="secret",
        drain_timeout_s=30, folder=folder,
    )  # fmt: skip
    try:
        yield keeper
    finally:
        await keeper.close()


def orders(
    *lenders: LenderReplica,
    off: Iterable[str] = (),
    drain: Iterable[str] = (),
    limits: dict[str, int] | None = None,
    parts: dict[str, dict[str, Any]] | None = None,
) -> EngineOrders:
    return EngineOrders(
        draining=False, stop_timeout_s=60, role=Role.UNIFIED, peers=(), lenders=lenders,
        lenders_off=tuple(off), drain_loans=tuple(drain), lender_limits=limits or {},
        parts=parts or {},
    )  # fmt: skip


def lender(cold: Cold, name: str = "cold") -> LenderReplica:
    return LenderReplica(model=name, id=f"{name}-0", address=cold.address or NOWHERE)


def rings(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith("loomserve-ring-")]


async def test_a_loan_is_opened_once_and_shown(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        await keeper.keep(0)
        assert not hot.called
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        await keeper.keep(10)
        assert cold.opened == 1
        (asked,) = cold.lent.values()
        assert (asked.borrower, asked.guest["blocks"]) == ("hot", 8)
        assert keeper.state is not None
        (loan,) = keeper.state.loans
        assert (loan.name, loan.lender, loan.lender_replica) == (asked.name, "cold", "cold-0")
        assert (loan.borrower, loan.borrower_replica, loan.age_s) == ("hot", "h0", 10)
        assert (loan.wait_mean_us, loan.wait_max_us) == (200, 900)
        assert (loan.wait_share, loan.service_share) == pytest.approx((2e-4, 4e-4))
        assert rings(tmp_path)
    assert not cold.lent
    assert not hot.loans
    assert not rings(tmp_path)


async def test_a_loan_with_a_lender_that_is_switched_off_ends_when_no_request_is_left(
    tmp_path: Path,
) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        keeper.learn(orders(off=["cold"]))
        await keeper.keep(1)
        assert keeper.state is not None
        assert [loan.draining for loan in keeper.state.loans] == [True]
        assert keeper.state.switched_off == ("cold",)
        assert "end_loan" not in hot.called
        next(iter(hot.loans.values()))["requests"] = 0
        await keeper.keep(2)
        assert not hot.loans
        assert not cold.lent
        assert not rings(tmp_path)
        keeper.learn(orders(lender(cold)))
        await keeper.keep(3)
        assert cold.opened == 2


async def test_the_engine_is_told_a_limit_once_and_at_the_opening_of_a_loan(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        for limit in (300, 300, None):
            keeper.learn(orders(lender(cold), limits={"cold": limit} if limit else None))
            await keeper.keep(0)
            assert [loan.get("most_bytes") for loan in hot.loans.values()] == [limit]
        assert hot.called.count("limit_loan") == 2
        assert hot.called.index("limit_loan") == hot.called.index("borrow") + 1


async def test_a_limit_of_nothing_drains_the_loan_and_opens_none(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        keeper.learn(orders(lender(cold), limits={"cold": 0}))
        await keeper.keep(1)
        assert keeper.state is not None
        assert [loan.draining for loan in keeper.state.loans] == [True]
        next(iter(hot.loans.values()))["requests"] = 0
        for now in (2, 200):
            await keeper.keep(now)
            assert not hot.loans
        assert keeper.state.limits == {"cold": 0}
        assert cold.opened == 1


async def test_a_part_is_lent_in_place_of_requests_and_comes_home_before_they_are_again(
    tmp_path: Path,
) -> None:
    hot, heads = Hot(), {"cold": {"heads": 1}}
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        lender = LenderReplica(model="cold", id="c0", address=cold.address)
        keeper.learn(orders(lender))
        await keeper.keep(0)
        (whole,) = hot.loans.values()
        whole["requests"] = 0
        keeper.learn(orders(lender, parts=heads))
        await keeper.keep(1)
        assert [asked.guest["of"] for asked in cold.lent.values()] == [heads["cold"]]
        assert keeper.state is not None
        (loan,) = keeper.state.loans
        assert loan.part is not None
        assert (loan.part.heads, loan.part.phase) == (1, "leaving")
        assert keeper.state.parts == heads

        keeper.learn(orders(lender))
        await keeper.keep(2)
        assert [loan["part"]["phase"] for loan in hot.loans.values()] == ["returning"]
        await keeper.keep(3)
        assert [asked.guest["of"] for asked in cold.lent.values()] == [None]
        assert [loan["part"] for loan in hot.loans.values()] == [None]


async def test_a_part_that_came_home_by_itself_is_lent_again_after_a_backoff(
    tmp_path: Path,
) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        lender = LenderReplica(model="cold", id="c0", address=cold.address)
        keeper.learn(orders(lender, parts={"cold": {"layers": [1, 2]}}))
        await keeper.keep(0)
        (loan,) = hot.loans.values()
        loan["part"] |= {"phase": "home", "why": "its lender was too slow"}
        await keeper.keep(0.5)
        assert not hot.loans
        assert not cold.lent
        assert keeper.state is not None
        assert "came home, since its lender was too slow" in keeper.state.problems["cold"]
        await keeper.keep(5)
        assert len(cold.lent) == 1


async def test_a_loan_that_does_not_empty_is_ended_after_the_timeout(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        keeper.learn(orders(off=["cold"]))
        await keeper.keep(1)
        await keeper.keep(30)
        assert hot.loans
        await keeper.keep(31)
        assert not hot.loans


async def test_a_controller_that_has_not_heard_of_a_lender_yet_ends_no_loan(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        for _ in range(2):
            keeper.learn(orders())
            await keeper.keep(1)
        assert "drain_loan" not in hot.called
        keeper.learn(orders(lender(cold)))
        keeper.learn(orders())
        await keeper.keep(2)
        assert "drain_loan" not in hot.called
        for _ in range(2):
            keeper.learn(orders())
        await keeper.keep(3)
        assert "drain_loan" in hot.called


async def test_an_operator_that_drains_a_loan_has_a_minute_without_it(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        (name,) = cold.lent
        next(iter(hot.loans.values()))["requests"] = 0
        keeper.learn(orders(lender(cold), drain=[name]))
        await keeper.keep(1)
        assert not hot.loans
        keeper.learn(orders(lender(cold)))
        await keeper.keep(60)
        assert cold.opened == 1
        await keeper.keep(61)
        assert cold.opened == 2


async def test_a_loan_that_broke_is_given_back_and_opened_anew_under_another_name(
    tmp_path: Path,
) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        (first,), (ring,) = cold.lent, rings(tmp_path)
        hot.breaks()
        await keeper.keep(5)
        assert not cold.lent
        assert not ring.exists()
        assert hot.called.count("end_loan") == 1
        assert keeper.state is not None
        assert keeper.state.broken == {"TIMED_OUT": 1}
        assert "after 5 s" in keeper.state.problems["cold"]
        await keeper.keep(6)
        (second,) = cold.lent
        assert second != first
        assert rings(tmp_path) != [ring]
        assert not keeper.state.problems


async def opening_times(hot: Hot, cold: Cold, keeper: LoanKeeper, until: int) -> list[int]:
    """The seconds at which the lender was asked, if loans break within a second."""
    times = []
    for now in range(until):
        before = cold.opened
        await keeper.keep(now)
        if cold.opened > before:
            times.append(now)
            hot.breaks()
    return times


async def test_the_backoff_doubles_to_a_minute_and_is_forgotten_after_a_long_loan(
    tmp_path: Path,
) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        times = await opening_times(hot, cold, keeper, 300)
        # Each loan is seen to be broken a second after it was opened.
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert gaps == [2, 3, 5, 9, 17, 33, 61, 61, 61]
        while not hot.loans:
            await keeper.keep(times[-1] + 100)
        hot.breaks()
        await keeper.keep(times[-1] + 170)
        await keeper.keep(times[-1] + 171)
        assert cold.lent


async def test_a_lender_that_refuses_is_asked_again_later_and_its_reason_shown(
    tmp_path: Path,
) -> None:
    hot = Hot()
    cold = Cold(refusal="nothing is left to lend")
    async with listening(cold), keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        assert keeper.state is not None
        assert keeper.state.problems == {"cold": "nothing is left to lend"}
        cold.refusal = None
        await keeper.keep(0.9)
        assert not cold.lent
        await keeper.keep(1)
        assert cold.lent


async def test_what_the_borrowers_engine_refuses_is_given_back(tmp_path: Path) -> None:
    hot = Hot(full=True)
    async with listening(Cold()) as cold, keeping(hot, tmp_path) as keeper:
        keeper.learn(orders(lender(cold)))
        await keeper.keep(0)
        assert cold.opened == 1
        assert not cold.lent
        assert not rings(tmp_path)
        assert keeper.state is not None
        assert keeper.state.problems == {"cold": "no side is free"}


async def test_a_lender_that_is_away_does_not_keep_others_from_lending(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path, most=2) as keeper:
        away = LenderReplica(model="away", id="away-0", address=NOWHERE)
        keeper.learn(orders(away, lender(cold)))
        await keeper.keep(0)
        assert len(cold.lent) == 1


async def test_no_more_loans_are_opened_than_the_engine_has_room_for(tmp_path: Path) -> None:
    hot = Hot()
    async with listening(Cold()) as cold, keeping(hot, tmp_path, most=2) as keeper:
        keeper.learn(orders(*(lender(cold, name) for name in ("a", "b", "c"))))
        await keeper.keep(0)
        await keeper.keep(1)
        assert keeper.state is not None
        assert [loan.lender for loan in keeper.state.loans] == ["a", "b"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["break", "off", "on", "refuse", "lend", "leave"]), max_size=20))
async def test_whatever_happens_both_sides_know_of_the_same_loans(
    tmp_path_factory: pytest.TempPathFactory, events: list[str]
) -> None:
    hot, folder = Hot(), tmp_path_factory.mktemp("rings")
    async with listening(Cold()) as cold, keeping(hot, folder) as keeper:
        told = orders(lender(cold))
        for now, event in enumerate(events):
            if event == "break":
                hot.breaks()
            elif event == "leave":
                for loan in hot.loans.values():
                    loan["requests"] = 0
            elif event in {"on", "off"}:
                told = orders(lender(cold)) if event == "on" else orders(off=["cold"])
            else:
                cold.refusal = "no" if event == "refuse" else None
            keeper.learn(told)
            await keeper.keep(now)
            names = {loan["name"] for loan in hot.loans.values()}
            assert keeper.state is not None
            assert names == set(cold.lent) == {loan.name for loan in keeper.state.loans}
            assert len(rings(folder)) == len(names) <= 1


def test_rings_of_processes_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    alive = tmp_path / f"loomserve-ring-{os.getpid()}-aa"
    gone = tmp_path / "loomserve-ring-4194999-bb"  # above the kernel's largest pid
    other = tmp_path / "psm_1"
    for path in (alive, gone, other):
        path.touch()
    remove_left_rings(tmp_path)
    assert set(tmp_path.iterdir()) == {alive, other}

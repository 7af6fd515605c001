"""What is compared of runs in which a cold model computed for a hot one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import pytest

from benchmarks.weave import (
    ARMS,
    COLD_REQUESTS,
    CONTEXT,
    LONGEST_ANSWER_S,
    WOVEN,
    Division,
    Load,
    Run,
    compared,
    divisions,
    kind_and_budget,
    served,
)
from benchmarks.weave_engines import Engine, Served, served_of
from benchmarks.workload import PrefixRequest, brief_conversations
from tests.waiting import PATIENCE_S

TASKS = {"post_us": 2.0, "pickup_us": 3.0, "wait_us": 9.0}
USUAL = Division(own=16, lent=80, cold=48)


def run(hot_tpot_ms: float, cold_tpot_ms: float, **figures: float) -> Run:
    hot, cold = (Served(100, 2.0, [tpot, tpot], [50.0]) for tpot in (hot_tpot_ms, cold_tpot_ms))
    return Run(hot, cold, figures)


def test_what_a_task_costs_is_of_the_loans_that_lasted() -> None:
    woven = [run(10, 30, **TASKS), run(10, 30)]
    found = compared({"dedicated": {1.0: [run(20, 20)] * 2}, "slices": {1.0: woven}}, "slices")
    assert found["hot_tpot_vs_dedicated_at_peak"]["median"] == pytest.approx(0.5)
    assert found["cold_tpot_ratio_mean"]["median"] == pytest.approx(1.5)
    assert found["cold_tpot_ratio_p99_n"] == [2, 2]
    assert found["per_layer_overhead_us"]["median"] == pytest.approx(5)
    assert found["wait_us_splitting"]["median"] == pytest.approx(3)


def test_the_ratios_are_told_even_where_no_loan_lasted() -> None:
    found = compared({"dedicated": {1.0: [run(20, 20)]}, "slices": {1.0: [run(10, 30)]}}, "slices")
    assert found["cold_tpot_ratio_mean"]["median"] == pytest.approx(1.5)
    assert not {"per_layer_overhead_us", "wait_us_splitting"} & found.keys()


def test_an_arm_may_name_its_lenders_budget() -> None:
    assert kind_and_budget("slices") == ("slices", None)
    assert kind_and_budget("slices@1.05") == ("slices", 1.05)


@pytest.mark.parametrize("ratio", [None, 0.5, 1.0, 2.0, 5.0])
def test_all_arms_have_the_same_memory(ratio: float | None) -> None:
    division = USUAL if ratio is None else USUAL.with_ratio(ratio)
    shares = divisions(division)
    assert shares.keys() == set(ARMS)
    assert {sum(each) for each in shares.values()} == {USUAL.total}
    assert {shares[arm] for arm in (WOVEN, "stock")} == {shares["dedicated"]}
    if ratio is not None:
        assert division.lent / division.own == pytest.approx(ratio, rel=0.03)


def test_a_run_has_its_cold_requests_and_hot_ones_until_they_are_answered() -> None:
    load = Load(brief_conversations(None, CONTEXT, requests=4000), COLD_REQUESTS, 0.1)
    cold = load.cold(6.0, "a")
    hot = load.hot(6.0, cold[-1].at_s, "a")
    assert len(cold) == COLD_REQUESTS >= 100
    assert cold[-1].at_s == pytest.approx((COLD_REQUESTS - 1) / 0.6)
    assert hot[-1].at_s >= cold[-1].at_s + LONGEST_ANSWER_S - 1
    assert load.cold(6.0, "a") == cold != load.cold(6.0, "b")


def asked(at_s: float, tokens: int) -> PrefixRequest:
    return PrefixRequest(at_s=at_s, blocks=(0,), tokens=8, output_tokens=tokens)


def test_what_is_not_answered_at_the_end_is_counted_and_not_timed() -> None:
    requests = [asked(0, 3), asked(1, 3), asked(2, 3), asked(9, 3)]
    times = [[11.0, 11.5, 12.0], [12.0, 13.0], [], []]
    found = served_of(requests, times, begin=10.0, end=15.0)
    assert (found.output_tokens, found.throughput) == (5, 1.0)
    assert found.tpot_ms == [500.0]
    assert found.ttft_ms == [1000.0, 1000.0]
    # The last one was not due yet.
    assert found.given_up == 2


class Model:
    """Tells how many requests it got, and whether it was to give some up."""

    def __init__(self) -> None:
        self.asked, self.cut = 0, False

    async def forget(self) -> None: ...

    async def serve(
        self, requests: Sequence[PrefixRequest], seed: str, ended: asyncio.Event | None = None
    ) -> Served:
        self.asked = len(requests)
        if ended is not None:
            await ended.wait()
            self.cut = True
        return Served(10, 1.0, [1.0], [1.0])


def test_a_run_ends_with_the_last_cold_request() -> None:
    hot, cold = Model(), Model()
    load = Load(brief_conversations(None, CONTEXT, requests=4000), 5, 1.0)
    asyncio.run(served(hot, cold, 2.0, load, "a"))  # type: ignore[arg-type]
    assert hot.cut
    assert not cold.cut
    assert cold.asked == 5 < hot.asked


async def slow_answers(
    llm: object, prompt: list[int], tokens: int, name: str, times: list[float]
) -> None:
    """A token at once and, where more are asked for than two, never the rest."""
    times += [time.monotonic()] * min(tokens, 2)
    if tokens > 2:
        await asyncio.sleep(3600)


def engine() -> Engine:
    """Without vLLM, whose tokens are :func:`slow_answers`'s."""
    made = object.__new__(Engine)
    made._llm, made._names = None, itertools.count()
    return made


def test_requests_that_are_not_answered_are_given_up_when_the_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.weave_engines.token_times", slow_answers)

    async def serve() -> Served:
        ended = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, ended.set)
        requests = [asked(0, 2), asked(0, 5), asked(3600, 2)]
        return await asyncio.wait_for(engine().serve(requests, "a", ended), PATIENCE_S)

    found = asyncio.run(serve())
    assert found.output_tokens == 4
    assert len(found.tpot_ms) == 1
    assert len(found.ttft_ms) == 2
    assert found.given_up == 1


def test_a_request_that_fails_is_told_even_if_others_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: object) -> None:
        raise ConnectionError("the engine is gone")

    monkeypatch.setattr("benchmarks.weave_engines.token_times", fails)

    async def serve() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, ended.set)
        await engine().serve([asked(0, 2)], "a", ended)

    with pytest.raises(ConnectionError):
        asyncio.run(serve())

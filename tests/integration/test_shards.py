"""Heads or layers of a hot engine move to a cold one and back while it answers, on real vLLM."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from benchmarks.engine import BLOCK_TOKENS, EXACT_BLOCK_BYTES
from tests.integration.lending_pair import (
    OWN_BLOCKS,
    Pair,
    ShardLoan,
    answers,
    begin,
    outputs,
    prompts,
    shard_loan,
)

pytestmark = pytest.mark.engine

EVERY_HEAD, EVERY_LAYER = 3, 30
LAYER_BYTES = 14_155_776
"""Of one's matrices in float32."""
STEPS_AWAY = 10


def served(
    pair: Pair, asked: list[list[int]], before_step: dict[int, Callable[[], Any]]
) -> list[list[int]]:
    """The answers; before the step of a number its order is given."""
    engine, ended = pair.hot.llm_engine, dict[str, list[int]]()
    names = [f"{os.urandom(3).hex()}-{at}" for at in range(len(asked))]
    for name, prompt in zip(names, asked, strict=True):
        begin(engine, name, prompt, 40)
    for step in itertools.count():
        if not engine.has_unfinished_requests():
            return [ended[name] for name in names]
        before_step.get(step, lambda: None)()
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = list(output.outputs[0].token_ids)
    raise AssertionError


# The end-to-end tests move heads.
@pytest.mark.parametrize(
    "shard",
    [pytest.param({"heads": 2}, marks=pytest.mark.slow), {"layers": [10, 22]}],
    ids=str,
)
def test_a_shard_leaves_and_comes_home_while_streams_run_and_tokens_are_the_same(
    pair: Pair, alone: list[list[int]], shard: dict[str, Any]
) -> None:
    phases: list[str] = []

    def look(loan: ShardLoan) -> None:
        phases.append(loan.phase)
        if phases.count("away") == STEPS_AWAY:
            loan.come_home()

    with shard_loan(pair, **shard) as loan:
        orders = {20: loan.begin, **{at: lambda: look(loan) for at in range(21, 100)}}
        assert served(pair, prompts(1, 16), orders) == alone
        # A machine may copy it between two looks; the order of phases is the same on all.
        copied = ("leaving", "returning")
        assert [phase for phase, _ in itertools.groupby(phases) if phase not in copied] == [
            "away",
            "home",
        ]
        assert loan.come_home()
        tasks = loan.ring.stats().tasks
        assert tasks > 0
        assert answers(pair.hot, prompts(1, 16)) == alone
        assert loan.ring.stats().tasks == tasks
    assert pair.call(pair.hot, "loan_state")["own_blocks"] == OWN_BLOCKS


def test_blocks_are_gained_while_heads_are_away_and_prefixes_stay_cached(pair: Pair) -> None:
    prompt = prompts(23, 1, 150)[0] + list(range(2000, 2000 + 3 * BLOCK_TOKENS))
    (first,) = outputs(pair.hot, [prompt], 8)
    with shard_loan(pair, heads=2) as loan:
        loan.begin()
        assert loan.phase == "away"
        # Two thirds of each block are elsewhere.
        assert pair.call(pair.hot, "loan_state")["own_blocks"] == EVERY_HEAD * OWN_BLOCKS
        (again,) = outputs(pair.hot, [prompt], 8)
        assert again.num_cached_tokens >= 3 * BLOCK_TOKENS
        assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_the_weights_of_layers_that_leave_become_blocks_and_come_back(
    pair: Pair, alone: list[list[int]]
) -> None:
    worker = psutil.Process(pair.hot.collective_rpc("process_id")[0])
    answers(pair.hot, prompts(1, 16))
    before = worker.memory_full_info().uss
    with shard_loan(pair, layers=[10, 22]) as loan:
        loan.begin()
        assert loan.phase == "away"
        blocks = pair.call(pair.hot, "loan_state")["own_blocks"]
        # Without the weights' memory there would be room for less.
        assert blocks > OWN_BLOCKS * EVERY_LAYER // (EVERY_LAYER - 12)
        freed = before - worker.memory_full_info().uss
        assert freed > 12 * LAYER_BYTES - blocks * EXACT_BLOCK_BYTES
        assert answers(pair.hot, prompts(1, 16)) == alone
        loan.come_home()
        assert loan.phase == "home"
        assert answers(pair.hot, prompts(1, 16)) == alone
    assert worker.memory_full_info().uss - before < 2 * LAYER_BYTES


@pytest.mark.slow
def test_a_shard_waits_for_blocks_that_its_lenders_requests_hold(
    pair: Pair, alone: list[list[int]]
) -> None:
    cold = pair.cold.llm_engine
    # Those that were never used are given first, and stand behind the others.
    answers(pair.cold, prompts(5, 16))
    for at in range(9):
        begin(cold, f"own-{at}", (prompts(6 + at, 1)[0] * 30)[:150], 40)
    for _ in range(20):
        cold.step()
    with shard_loan(pair, heads=1) as loan:
        loan.begin()
        assert loan.phase != "home"
        while cold.has_unfinished_requests():
            cold.step()
        assert loan.phase == "away"
        assert answers(pair.hot, prompts(1, 16)) == alone


def test_a_move_that_is_called_off_changes_nothing(pair: Pair, alone: list[list[int]]) -> None:
    # Steps go on meanwhile: the third after the order may compute at the lender.
    assert any(is_called_off_in_time(pair, alone) for _ in range(5))


def is_called_off_in_time(pair: Pair, alone: list[list[int]]) -> bool:
    with shard_loan(pair, heads=1) as loan:

        def begin_and_come_home() -> None:
            loan.begin()
            loan.come_home()

        assert served(pair, prompts(1, 16), {20: begin_and_come_home}) == alone
        (here,) = pair.loans()
        assert loan.phase == "home"
        assert here["shard"]["copied_bytes"] > 0
        return loan.ring.stats().tasks == 0


@pytest.mark.slow
@pytest.mark.parametrize("shard", [{"heads": 1}, {"layers": [10, 22]}], ids=str)
def test_a_lender_that_stalls_with_a_shard_costs_no_token(
    pair: Pair, alone: list[list[int]], shard: dict[str, Any]
) -> None:
    worker = pair.cold.collective_rpc("process_id")[0]
    with shard_loan(pair, **shard) as loan:
        loan.begin()
        assert loan.phase == "away"
        try:
            orders = {30: lambda: os.kill(worker, signal.SIGSTOP)}
            assert served(pair, prompts(1, 16), orders) == alone
        finally:
            os.kill(worker, signal.SIGCONT)
        assert pair.loans() == []
    assert answers(pair.hot, prompts(1, 16)) == alone

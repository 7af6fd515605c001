"""A shard of a hot engine's KV is with a cold one; whole blocks go to the store and come back."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from benchmarks.engine import BLOCK_TOKENS
from loomserve.kvstore.server.protocol import HANDS_OVER
from tests.integration.conftest import Answer, StoredEngine
from tests.integration.lending_pair import Pair, answers, prompts, shard_loan

pytestmark = pytest.mark.engine

SHARDS = [{"heads": 2}, {"layers": [10, 22]}]
TOKENS = 20


@pytest.fixture(name="lent")
def _lent(pair: Pair, stored_hot: StoredEngine) -> Pair:
    stored_hot.flush_store()
    stored_hot.forget()
    return Pair(stored_hot.llm, pair.cold)


def from_store(engine: StoredEngine, asked: list[list[int]]) -> list[Answer]:
    """Each alone, with nothing in the engine's own prefix cache."""
    found = []
    for prompt in asked:
        engine.forget()
        found += engine.answer([prompt], TOKENS)
    return found


def long_prompts(seed: int) -> list[list[int]]:
    """Of several blocks, the last of them in part."""
    return [prompt * 4 for prompt in prompts(seed, 4, 70)]


def full_blocks(prompt: list[int]) -> int:
    """Tokens of them that can be loaded: one is left to compute."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_blocks_of_before_are_loaded_while_a_shard_is_away_and_the_other_way_round(
    pair: Pair, lent: Pair, stored_hot: StoredEngine, shard: dict[str, Any]
) -> None:
    before, meanwhile = long_prompts(71), long_prompts(72)
    expected = answers(pair.hot, [*before, *meanwhile], TOKENS)
    stored_hot.answer(before, kv_transfer={HANDS_OVER: True})
    with shard_loan(lent, **shard) as loan:
        loan.begin()
        assert loan.phase == "away"
        loaded = from_store(stored_hot, before)
        assert [each.cached for each in loaded] == [full_blocks(prompt) for prompt in before]
        assert [each.tokens for each in loaded] == expected[:4]
        # As a prefill engine, so that all of it is saved.
        together = stored_hot.answer(meanwhile, TOKENS, {HANDS_OVER: True})
        assert [each.tokens for each in together] == expected[4:]
        loan.come_home()
        assert loan.phase == "home"
        loaded = from_store(stored_hot, meanwhile)
        assert [each.cached for each in loaded] == [full_blocks(prompt) for prompt in meanwhile]
        assert [each.tokens for each in loaded] == expected[4:]


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_what_a_stalled_lender_should_have_had_loaded_is_computed(
    pair: Pair, lent: Pair, stored_hot: StoredEngine, shard: dict[str, Any]
) -> None:
    asked = long_prompts(73)
    expected = answers(pair.hot, asked, TOKENS)
    stored_hot.answer(asked, kv_transfer={HANDS_OVER: True})
    stored_hot.forget()
    worker = pair.cold.collective_rpc("process_id")[0]
    with shard_loan(lent, **shard) as loan:
        loan.begin()
        assert loan.phase == "away"
        os.kill(worker, signal.SIGSTOP)
        try:
            found = stored_hot.answer(asked, TOKENS)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert [each.tokens for each in found] == expected
        assert lent.loans() == []
    # Nothing wrong was kept.
    assert [each.tokens for each in from_store(stored_hot, asked)] == expected


def test_an_engine_that_borrows_lends_nothing_and_one_that_lends_borrows_nothing(
    pair: Pair, lent: Pair
) -> None:
    back = Pair(pair.hot, lent.hot)
    with shard_loan(lent, heads=1) as loan:
        loan.begin()
        with pytest.raises(Exception, match="it borrows just now"), back.loan():
            pass
    with (
        pytest.raises(
            Exception, match="room for 18 of the borrower's blocks, which are 24 at least"
        ),
        shard_loan(back, heads=2) as loan,
    ):
        loan.begin()
    with (
        back.loan(),
        pytest.raises(Exception, match="it lends just now"),
        shard_loan(lent, heads=1) as loan,
    ):
        loan.begin()
    assert lent.loans() == back.loans() == []

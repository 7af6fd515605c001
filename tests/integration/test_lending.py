"""A hot engine and a cold one: attention of the first is computed by the second, on real vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks.engine import BLOCK_TOKENS
from tests.integration.lending_pair import Pair, answers, begin, lending_engine, outputs, prompts

pytestmark = pytest.mark.engine

MEASUREMENTS = 5
HOSTILE_LOANS = 2


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_answers_are_the_same_wherever_their_attention_is_computed(
    pair: Pair, alone: list[list[int]], share: float
) -> None:
    with pair.loan() as stats:
        pair.place("ratio" if share else "local", share)
        assert answers(pair.hot, prompts(1, 16)) == alone
        assert (stats().tasks > 0) is (share > 0)


def test_prefixes_are_reused_on_the_side_where_they_lie(pair: Pair) -> None:
    prompt = prompts(5, 1)[0] + list(range(2000, 2000 + 3 * BLOCK_TOKENS))
    (alone,) = answers(pair.hot, [prompt], 8)
    with pair.loan():
        pair.place("ratio", 1.0)
        first, again = (outputs(pair.hot, [prompt], 8)[0] for _ in range(2))
        # It is cached in the own memory, which is no help where it is placed now.
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens >= 3 * BLOCK_TOKENS
        assert list(first.outputs[0].token_ids) == list(again.outputs[0].token_ids) == alone


def test_requests_that_are_aborted_leave_their_lenders_blocks(pair: Pair) -> None:
    with pair.loan():
        pair.place("ratio", 1.0)
        engine = pair.hot.llm_engine
        free = pair.loans()[0]["free_blocks"]
        for at, prompt in enumerate(prompts(7, 4)):
            begin(engine, f"aborted-{at}", prompt, 200)
        for _ in range(10):
            engine.step()
        assert pair.loans()[0]["free_blocks"] < free
        engine.abort_request([f"aborted-{at}" for at in range(4)])
        while engine.has_unfinished_requests():
            engine.step()
        assert pair.loans()[0]["free_blocks"] == free


def test_running_requests_move_home_and_back_and_answer_as_ever(
    pair: Pair, alone: list[list[int]]
) -> None:
    moved, engine = pair.call(pair.hot, "loan_state")["moved"], pair.hot.llm_engine
    ended: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = list(output.outputs[0].token_ids)

    with pair.loan():
        pair.place("ratio", 1.0)
        # vLLM's client is one thread's, so no generate() in another.
        for at, prompt in enumerate(prompts(1, 16)[:4]):
            begin(engine, f"moved-{at}", prompt, 40)
        while pair.loans()[0]["requests"] < 4:
            step()
        assert not ended
        # The own memory has room for them, so nothing is left with the lender.
        assert pair.call(pair.hot, "drain_loan", pair.loans()[0]["partition"])
        while engine.has_unfinished_requests():
            step()
        assert [ended[f"moved-{at}"] for at in range(4)] == alone[:4]
    assert pair.call(pair.hot, "loan_state")["moved"] >= moved + 4


def test_a_lender_serves_its_own_requests_meanwhile_and_both_answer_as_ever(
    pair: Pair, alone: list[list[int]]
) -> None:
    ours = prompts(11, 6)
    undisturbed = answers(pair.cold, ours)
    with pair.loan() as stats:
        pair.place("ratio", 0.5)
        with ThreadPoolExecutor() as threads:
            theirs = threads.submit(answers, pair.cold, ours)
            assert answers(pair.hot, prompts(1, 16)) == alone
            assert theirs.result() == undisturbed
        assert stats().polled > 0
        assert stats().idled > 0


@pytest.mark.slow
def test_cut_operators_compute_the_same(pair: Pair) -> None:
    asked = prompts(19, 8, 300)
    whole = answers(pair.cold, asked)
    with pair.loan():
        # What a cut costs is measured, and too much on cores that others take just then.
        for polling in ("operators", *["slices"] * MEASUREMENTS):
            plans = pair.call(pair.cold, "look_for_tasks", polling)
            pair.cold.reset_prefix_cache()
            assert answers(pair.cold, asked) == whole
            if plans and max(plans["decode"]["slices"].values()) > 1:
                break
    # The output projection, whose packed weights are cut along the vocabulary.
    assert max(plans["decode"]["slices"].values()) > 1


def test_a_lender_that_needs_its_memory_gets_it_back_and_nothing_is_lost(
    pair: Pair, alone: list[list[int]]
) -> None:
    # More than is left to the lender while everything is lent.
    large = prompts(13, 12, 400)
    undisturbed = answers(pair.cold, large, 60)
    with pair.loan():
        pair.place("ratio", 1.0)
        with ThreadPoolExecutor() as threads:
            theirs = threads.submit(answers, pair.cold, large, 60)
            assert answers(pair.hot, prompts(1, 16)) == alone
            assert theirs.result() == undisturbed
        # By and by from a borrower that leaves in time, else the whole loan, of whose end a
        # borrower without requests has not yet heard.
        lent = pair.call(pair.cold, "lent_state")
        taken_back = sum(one["taken_back_blocks"] for one in lent)
        assert taken_back or not lent or not pair.loans()
        # Without requests it lends everything again, once it is asked: it does nothing by itself.
        for _ in range(30):
            pair.call(pair.cold, "on_idle")
        for one in pair.call(pair.cold, "lent_state"):
            assert one["blocks"] == one["most_blocks"]


@pytest.mark.parametrize("seed", [None, 7])
def test_a_stalled_lender_is_given_up_and_its_requests_are_computed_elsewhere(
    pair: Pair, alone: list[list[int]], seed: int | None
) -> None:
    expected = alone if seed is None else answers(pair.hot, prompts(1, 16), seed=seed)
    worker = pair.cold.collective_rpc("process_id")[0]
    before = pair.call(pair.hot, "loan_state")["broken"].get("TIMED_OUT", 0)
    with pair.loan() as stats:
        pair.place("ratio", 1.0)
        with ThreadPoolExecutor() as threads:
            begun = threads.submit(answers, pair.hot, prompts(1, 16), seed=seed)
            while not stats().tasks:
                time.sleep(0.01)
            os.kill(worker, signal.SIGSTOP)
            try:
                assert begun.result() == expected
            finally:
                os.kill(worker, signal.SIGCONT)
        assert pair.loans() == []
        assert pair.call(pair.hot, "loan_state")["broken"]["TIMED_OUT"] == before + 1


@pytest.mark.slow
def test_whatever_a_borrowers_process_writes_its_lender_answers_as_ever(pair: Pair) -> None:
    # Enough of them that memory comes back from the borrower while they run.
    ours = prompts(23, 8, 400)
    undisturbed = answers(pair.cold, ours, 40)
    asked = pair.call(pair.hot, "borrowing")
    rings = [f"/dev/shm/loomserve-ring-{os.getpid()}-hostile-{at}" for at in range(HOSTILE_LOANS)]
    command = [sys.executable, "-m", "tests.integration.hostile_borrower", *rings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hostile:
        assert hostile.stdout is not None
        assert hostile.stdout.readline() == "ready\n"
        served = 0
        try:
            for at, ring in enumerate(rings):
                pair.call(pair.cold, "lend", f"hostile-{at}", ring, asked)
                for _ in range(20):
                    served += sum(
                        one["polled"] + one["idled"] for one in pair.call(pair.cold, "lent_state")
                    )
                    time.sleep(0.01)
                pair.cold.reset_prefix_cache()
                assert answers(pair.cold, ours, 40) == undisturbed
                pair.call(pair.cold, "end_lending", f"hostile-{at}")
            assert hostile.wait(60) == 0
        finally:
            hostile.kill()
    assert served, "some of its tasks were in order"
    pair.cold.reset_prefix_cache()
    assert answers(pair.cold, ours, 40) == undisturbed


@pytest.fixture(scope="module", name="other")
def _other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of another shape: fewer layers, smaller heads, no groups of them, larger blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("other")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    block = 5 * 2 * 4 * 32 * 64 * 4
    engine = lending_engine(
        str(folder),
        block_size=64,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=300 * block,
        lending={
            "lend_bytes": 250 * block,
            "borrow_bytes": 20 * block,
            "patience_ms": 3000,
        },
    )
    yield engine
    del engine


def test_a_guest_of_another_shape_answers_as_ever(
    pair: Pair, other: Any, alone: list[list[int]]
) -> None:
    asked = prompts(17, 8)
    smaller = answers(other, asked)
    for hot, cold, question, answer in (
        (other, pair.cold, asked, smaller),
        (pair.hot, other, prompts(1, 16), alone),
    ):
        mixed = Pair(hot, cold)
        with mixed.loan() as stats:
            mixed.place("ratio", 1.0)
            assert answers(hot, question) == answer
            assert stats().tasks > 0

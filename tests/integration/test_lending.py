"""A hot engine and a cold one: attention of the first is computed by the second, on real vLLM."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine as engines
from benchmarks.engine import BLOCK_TOKENS, block_bytes, call_loans
from loomserve.platform import catalog
from loomserve.platform.lending.ring import Ring, RingStats

pytestmark = pytest.mark.engine

OWN_BLOCKS = 24
DEMO_BLOCK_BYTES = block_bytes("float32")
_names = itertools.count()


def lending_engine(model: str, *, lending: dict[str, Any], **options: Any) -> Any:
    return engines.lending_engine(
        model,
        lending,
        {"queue": "fair", "preemption": "recompute"},
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        **options,
    )


@dataclass
class Pair:
    """``hot`` borrows from ``cold``, whose engines are real and of the same machine."""

    hot: Any
    cold: Any

    def call(self, engine: Any, method: str, *args: Any) -> Any:
        return call_loans(engine, method, *args)

    @contextmanager
    def loan(self) -> Iterator[Callable[[], RingStats]]:
        """While open, hot requests may lie with the cold engine; yields the ring's counters."""
        name = f"test-{next(_names)}"
        path = f"/dev/shm/loomserve-ring-{os.getpid()}-{name}"
        self.call(self.cold, "lend", name, path, self.call(self.hot, "borrowing"))
        side = self.call(self.hot, "borrow", name, path)
        ring = Ring.attach(Path(path))
        try:
            yield ring.stats
        finally:
            self.call(self.hot, "end_loan", side)
            self.call(self.cold, "end_lending", name)
            ring.close()

    def place(self, placement: str, share: float = 0.0) -> None:
        self.call(self.hot, "place", placement, share)

    def loans(self) -> list[dict[str, Any]]:
        loans: list[dict[str, Any]] = self.call(self.hot, "loan_state")["loans"]
        return loans


@pytest.fixture(scope="module", name="pair")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = str(catalog.resolve("demo", tmp_path_factory.mktemp("model")))
    lent = 3 * OWN_BLOCKS
    hot = lending_engine(
        model,
        kv_cache_memory_bytes=OWN_BLOCKS * DEMO_BLOCK_BYTES,
        # A busy machine's lender is slow, and must not lose the loan for it.
        lending={
            "borrow_bytes": lent * DEMO_BLOCK_BYTES,
            "placement": "ratio",
            "patience_ms": 3000,
        },
    )
    cold = lending_engine(
        model,
        kv_cache_memory_bytes=(OWN_BLOCKS + lent) * DEMO_BLOCK_BYTES,
        core=1 % (os.cpu_count() or 1),
        lending={"lend_bytes": lent * DEMO_BLOCK_BYTES},
    )
    yield Pair(hot, cold)
    del hot, cold


def prompts(seed: int, number: int, longest: int = 150) -> list[list[int]]:
    source = random.Random(seed)
    return [
        [source.randrange(1000, 40000) for _ in range(source.randrange(5, longest))]
        for _ in range(number)
    ]


def answers(engine: Any, asked: Sequence[list[int]], tokens: int = 40) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs(engine, asked, tokens)]


def outputs(engine: Any, asked: Sequence[list[int]], tokens: int) -> list[Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found: list[Any] = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in asked], greedy, use_tqdm=False
    )
    return found


@pytest.fixture(scope="module", name="alone")
def _alone(pair: Pair) -> list[list[int]]:
    """What the hot engine answers without a lender, through preemptions."""
    return answers(pair.hot, prompts(1, 16))


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


def begin(engine: Any, name: str, prompt: list[int], tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), greedy)


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
        assert pair.call(pair.hot, "drain_loan", pair.loans()[0]["side"])
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


def test_cut_operators_compute_the_same(pair: Pair) -> None:
    asked = prompts(19, 8, 300)
    whole = answers(pair.cold, asked)
    with pair.loan():
        for polling in ("operators", "parts"):
            plans = pair.call(pair.cold, "look_for_tasks", polling)
            pair.cold.reset_prefix_cache()
            assert answers(pair.cold, asked) == whole
    # The output projection, whose packed weights are cut along the vocabulary.
    assert max(plans["decode"]["parts"].values()) > 1


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
        # By and by from a borrower that leaves in time, else the whole loan.
        taken_back = sum(one["taken_back"] for one in pair.call(pair.cold, "lent_state"))
        assert taken_back or not pair.loans()


def test_a_stalled_lender_is_given_up_and_its_requests_are_computed_elsewhere(
    pair: Pair, alone: list[list[int]]
) -> None:
    worker = pair.cold.collective_rpc("process_id")[0]
    before = pair.call(pair.hot, "loan_state")["broken"].get("TIMED_OUT", 0)
    with pair.loan() as stats:
        pair.place("ratio", 1.0)
        with ThreadPoolExecutor() as threads:
            begun = threads.submit(answers, pair.hot, prompts(1, 16))
            while not stats().tasks:
                time.sleep(0.01)
            os.kill(worker, signal.SIGSTOP)
            try:
                assert begun.result() == alone
            finally:
                os.kill(worker, signal.SIGCONT)
        assert pair.loans() == []
        assert pair.call(pair.hot, "loan_state")["broken"]["TIMED_OUT"] == before + 1


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

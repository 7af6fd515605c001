"""Loans between real vLLM engines by the kernels for GPUs, which are interpreted on CPU memory."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton, which interprets the kernels, is not installed")

from benchmarks.engine import BLOCK_TOKENS, end
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import Closed
from tests.integration import tiny_llama
from tests.integration.lending_pair import (
    Pair,
    answers,
    begin,
    lending_engine,
    outputs,
    shard_loan,
)

pytestmark = pytest.mark.engine

HEAD_SIZE, BLOCKS = 32, 16
BLOCK_BYTES = 2 * 2 * 2 * HEAD_SIZE * BLOCK_TOKENS * 4
"""Of two layers with two KV heads, in float32."""
VOCABULARY = 512


@pytest.fixture(scope="module", params=["LHBNC", pytest.param("LBHNC", marks=pytest.mark.slow)])
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.save(folder, vocabulary=VOCABULARY, context=128, head_size=HEAD_SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("VLLM_KV_CACHE_LAYOUT", request.param)
        hot = engine(
            folder,
            blocks=BLOCKS,
            # The interpreter takes a second for what a GPU does in microseconds.
            lending={
                "borrow_bytes": BLOCKS * BLOCK_BYTES,
                "placement": "ratio",
                "patience_ms": 120_000,
                "move": False,
            },
        )
        cold = engine(
            folder,
            blocks=2 * BLOCKS,
            number=1,
            lending={"lend_bytes": BLOCKS * BLOCK_BYTES, "polling": "steps"},
        )
    yield Pair(hot, cold)
    end(hot)
    end(cold)


def engine(model: Path, *, blocks: int, **options: Any) -> Any:
    return lending_engine(
        str(model),
        worker="tests.integration.interpreted_worker.InterpretedWorker",
        kv_cache_memory_bytes=blocks * BLOCK_BYTES,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        # Fewer than a block has: a block is copied whole nevertheless.
        max_num_batched_tokens=12,
        **options,
    )


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(("share", "lengths"), [(0.5, (5, 40, 21)), (1.0, (36,))])
def test_answers_are_those_of_attention_at_home(
    interpreted: Pair, share: float, lengths: tuple[int, ...]
) -> None:
    # Prompts computed in parts, in one block and in two.
    asked = prompts(1, *lengths)
    with interpreted.loan() as stats:
        interpreted.place("local")
        alone = answers(interpreted.hot, asked, 8)
        assert stats().tasks == 0
        interpreted.hot.reset_prefix_cache()
        interpreted.place("ratio", share)
        assert answers(interpreted.hot, asked, 8) == alone
        counted = stats()
        assert counted.tasks > 0
        assert counted.idled == counted.tasks
        assert counted.wait_ns > 0
    assert not beside_rings()


def test_a_lender_answers_its_own_requests_meanwhile(interpreted: Pair) -> None:
    ours, theirs = prompts(2, 9, 30), prompts(3, 12)
    undisturbed = answers(interpreted.cold, ours, 8), answers(interpreted.hot, theirs, 8)
    with interpreted.loan():
        interpreted.place("ratio", 1.0)
        interpreted.hot.reset_prefix_cache()
        again = answers(interpreted.hot, theirs, 8)
        assert (answers(interpreted.cold, ours, 8), again) == undisturbed


@pytest.mark.parametrize("gives_up", ["lender", "borrower"])
def test_requests_whose_loan_ends_within_a_step_lose_nothing(
    interpreted: Pair, gives_up: str
) -> None:
    asked = prompts(4, 9, 7)
    alone = answers(interpreted.hot, asked, 6)
    hot = interpreted.hot.llm_engine
    answered: dict[str, list[int]] = {}
    with interpreted.loan() as stats:
        interpreted.place("ratio", 1.0)
        interpreted.hot.reset_prefix_cache()
        for at, prompt in enumerate(asked):
            begin(interpreted.hot.llm_engine, f"{gives_up}-{at}", prompt, 6)
        while stats().tasks < 4:
            step(hot, answered)
        assert not answered
        (ring,) = (Ring.attach(path) for path in rings())
        reason = Closed.REVOKED if gives_up == "lender" else Closed.TIMED_OUT
        closing = threading.Timer(0.2, ring.shut, [reason])
        closing.start()
        while hot.has_unfinished_requests():
            step(hot, answered)
        closing.join()
        assert ring.closed is reason
        ring.close()
    assert [answered[f"{gives_up}-{at}"] for at in range(2)] == alone


def step(engine: Any, answered: dict[str, list[int]]) -> None:
    for output in engine.step():
        if output.finished:
            answered[output.request_id] = list(output.outputs[0].token_ids)


def test_a_head_leaves_within_a_stream_and_comes_home(interpreted: Pair) -> None:
    asked = prompts(5, 40, 7)
    alone = answers(interpreted.hot, asked, 10)
    hot = interpreted.hot.llm_engine
    answered: dict[str, list[int]] = {}
    with shard_loan(interpreted, heads=1) as loan:
        for at, prompt in enumerate(asked):
            begin(hot, f"head-{at}", prompt, 10)
        for _ in range(3):
            step(hot, answered)
        loan.begin()
        phases = [loan.phase]
        while hot.has_unfinished_requests():
            step(hot, answered)
            phases.append(loan.phase)
            if phases.count("away") == 2:
                loan.come_home()
        assert "away" in phases
        assert phases[-1] == "home"
        assert loan.ring.stats().tasks > 0
    assert [answered[f"head-{at}"] for at in range(2)] == alone
    assert not beside_rings()


def test_a_prefix_whose_head_has_left_is_found_and_leaves_room_for_more(
    interpreted: Pair, request: pytest.FixtureRequest
) -> None:
    (prompt,) = prompts(6, 40)
    (alone,) = answers(interpreted.hot, [prompt], 4)
    with shard_loan(interpreted, heads=1) as loan:
        loan.begin()
        assert loan.phase == "away"
        # Where heads lie together in a block, a page has more than one.
        room = 2 if request.node.callspec.params["interpreted"] == "LHBNC" else 1
        assert interpreted.call(interpreted.hot, "loan_state")["own_blocks"] == room * BLOCKS
        (again,) = outputs(interpreted.hot, [prompt], 4)
        assert again.num_cached_tokens == BLOCK_TOKENS
        assert list(again.outputs[0].token_ids) == alone


def test_what_kernels_cannot_carry_is_refused(interpreted: Pair) -> None:
    with pytest.raises(Exception, match="between CPU devices only"):
        interpreted.call(interpreted.hot, "borrowing", {"layers": [0, 1]})


def rings() -> list[Path]:
    return list(Path("/dev/shm").glob(f"loomserve-ring-{os.getpid()}-test-*[0-9]"))


def beside_rings() -> list[Path]:
    mine = f"loomserve-ring-{os.getpid()}-*"
    return [path for path in Path("/dev/shm").glob(mine) if path.suffix in (".task", ".answer")]

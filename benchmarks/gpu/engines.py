"""Two real vLLM engines, one with the other's requests: whether tokens are the same, and the time.

Both are on one GPU, in a process each, with random weights of Llama-3-8B's shape and four layers.
Without a GPU they compute a small model on CPUs, and the kernels between them are interpreted.
"""

from __future__ import annotations

import os
import random
import time
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.step import DEVICE, HAS_GPU, Results, main

# isort: split
import torch

from benchmarks.engine import BLOCK_TOKENS, call_loans, end, lending_engine, save_llama
from loomserve.platform.lending.ring.ring import Ring

LAYERS, DTYPE = (4, "bfloat16") if HAS_GPU else (2, "float32")
HEADS, KV_HEADS, HEAD_SIZE = (32, 8, 128) if HAS_GPU else (4, 2, 32)
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * BLOCK_TOKENS * (2 if HAS_GPU else 4)
BLOCKS, CONTEXT = (2048, 2048) if HAS_GPU else (16, 128)
PROMPTS, PROMPT, ANSWER = (16, 256, 64) if HAS_GPU else (2, 10, 6)
PATIENCE_MS = 5_000 if HAS_GPU else 120_000
WORKERS = {
    True: "loomserve.platform.lending.engine.gpu_worker.RemoteAttentionGpuWorker",
    False: "benchmarks.gpu.interpreted_worker.InterpretedWorker",
}


def save_model(folder: Path, context: int = CONTEXT) -> None:
    """Write a Llama whose random weights are large enough that tokens depend on attention."""
    hidden = HEADS * HEAD_SIZE
    with torch.device(DEVICE):
        save_llama(
            folder,
            DTYPE,
            vocab_size=32_000 if HAS_GPU else 512,
            hidden_size=hidden,
            intermediate_size=14336 if HAS_GPU else 64,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=context,
            initializer_range=1.5 * hidden**-0.5,
            tie_word_embeddings=True,
        )


def engine(model: Path, number: int, blocks: int, **lending: Any) -> Any:
    options: dict[str, Any] = {"async_scheduling": False, "gpu_memory_utilization": 0.4}
    return lending_engine(
        str(model),
        lending,
        {"queue": "fair", "preemption": "recompute"},
        worker=WORKERS[HAS_GPU],
        core=min(number, (os.cpu_count() or 1) - 1),
        dtype=DTYPE,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=blocks * BLOCK_BYTES,
        max_model_len=CONTEXT,
        max_num_seqs=PROMPTS,
        max_num_batched_tokens=1024 if HAS_GPU else 32,
        **(options if HAS_GPU else {}),
    )


def answers(llm: Any) -> tuple[list[list[int]], float]:
    """Greedy ones to the same prompts each time, and the seconds that they took together."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    source = random.Random(0)
    asked = [[source.randrange(512) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in asked], greedy, use_tqdm=False
    )
    taken = time.perf_counter() - begin
    return [list(output.outputs[0].token_ids) for output in outputs], taken


def compare(results: Results, hot: Any, cold: Any, folder: Path) -> str:
    call_loans(hot, "place", "local", 0.0)
    # The first one warms up, and shows how far two runs at home are apart.
    first, _ = answers(hot)
    at_home, home_s = answers(hot)
    results.add("tokens equal at home, of", [equal(first, at_home), PROMPTS * ANSWER])
    path = folder / "ring"
    call_loans(cold, "lend", "check", str(path), call_loans(hot, "borrowing"))
    partition = call_loans(hot, "borrow", "check", str(path))
    ring = Ring.attach(path)
    call_loans(hot, "place", "ratio", 1.0)
    lent, lent_s = answers(hot)
    same, stats = equal(at_home, lent), ring.stats()
    results.add("tokens equal when lent, of", [same, PROMPTS * ANSWER])
    results.add("the ring is", ring.closed.name)
    results.add("tasks", stats.tasks)
    if HAS_GPU:
        results.add("seconds at home, lent", [home_s, lent_s])
        results.add("a wait, us", stats.wait_ns / max(stats.tasks, 1) / 1e3)
        results.add("a service, us", stats.service_ns / max(stats.idled, 1) / 1e3)
    call_loans(hot, "end_loan", partition)
    call_loans(cold, "end_lending", "check")
    if not stats.tasks or stats.idled != stats.tasks:
        raise RuntimeError(f"{stats.tasks} tasks, of which {stats.idled} were served")
    longer = f", {lent_s / home_s:.2f} times as long" if HAS_GPU else ""
    return f"{stats.tasks} tasks, {same} of {PROMPTS * ANSWER} tokens equal{longer}"


def compare_heads(results: Results, hot: Any, cold: Any, folder: Path) -> str:
    """Have the cold engine compute half of the KV heads of all requests, and then none again."""
    at_home, home_s = answers(hot)
    path, part = folder / "heads", {"heads": KV_HEADS // 2}
    call_loans(cold, "lend", "heads", str(path), call_loans(hot, "borrowing", part))
    partition = call_loans(hot, "borrow", "heads", str(path), part)
    # Where nothing runs, to look moves them on.
    if (phase := phase_of_part(hot)) != "away":
        raise RuntimeError(f"the heads are not away, but {phase}")
    away, away_s = answers(hot)
    call_loans(hot, "drain_loan", partition)
    if (phase := phase_of_part(hot)) != "home":
        raise RuntimeError(f"the heads are not at home again, but {phase}")
    again, _ = answers(hot)
    call_loans(hot, "end_loan", partition)
    call_loans(cold, "end_lending", "heads")
    same, of = equal(at_home, away), PROMPTS * ANSWER
    results.add("tokens equal with half of the heads away, of", [same, of])
    results.add("tokens equal with them at home again, of", [equal(at_home, again), of])
    if HAS_GPU:
        results.add("seconds at home, with heads away", [home_s, away_s])
    return f"{same} with half of the heads away"


def phase_of_part(hot: Any) -> str:
    (loan,) = call_loans(hot, "loan_state")["loans"]
    return str(loan["shard"]["phase"])


def equal(one: list[list[int]], other: list[list[int]]) -> int:
    """How many tokens are, place by place."""
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return sum(a == b for a, b in pairs)


def engines(results: Results) -> None:
    os.environ["VLLM_KV_CACHE_LAYOUT"] = "LBHNC"
    with TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        save_model(folder)
        lent = BLOCKS * BLOCK_BYTES
        hot = engine(
            folder, 0, BLOCKS, borrow_bytes=lent, placement="local", patience_ms=PATIENCE_MS,
            move=False,
        )  # fmt: skip
        cold = engine(folder, 1, 2 * BLOCKS, lend_bytes=lent, polling="steps")
        try:
            told = compare(results, hot, cold, folder)
            results.end(f"{told}; {compare_heads(results, hot, cold, folder)}")
        finally:
            end(hot)
            end(cold)


if __name__ == "__main__":
    main(engines)

"""Two real vLLM engines, one with the other's requests: whether answers are the same, and the time.

Both are on one GPU, in a process each, with random weights of Llama-3-8B's shape and four layers.
In bfloat16 their answers depend on the batch, so that what lending changes stands beside what
batches half as large change: the tokens, and the log probabilities of those before the first other
one. ``LAYOUT`` is that of their KV, LHBNC if it is not set: in it, heads that are away leave room
for more blocks. Without a GPU they compute a small model on CPUs, and the kernels between them are
interpreted.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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
HALF = PROMPTS // 2
PATIENCE_MS = 5_000 if HAS_GPU else 120_000
WORKERS = {
    True: "loomserve.platform.lending.engine.gpu_worker.RemoteAttentionGpuWorker",
    False: "tests.integration.interpreted_worker.InterpretedWorker",
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


class Answers(NamedTuple):
    """Greedy ones to the same prompts each time, with the seconds that they took together."""

    tokens: list[list[int]]
    log_probabilities: list[list[float]]
    seconds: float


def answers(llm: Any, at_once: int = PROMPTS) -> Answers:
    """Those to all prompts, of which so many are in the engine together."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    source = random.Random(0)
    asked = [[source.randrange(512) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in asked]
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    outputs = [
        output.outputs[0]
        for part in batched(prompts, at_once)
        for output in llm.generate(part, greedy, use_tqdm=False)
    ]
    taken = time.perf_counter() - begin
    return Answers(
        [list(output.token_ids) for output in outputs],
        [
            [of[token].logprob for of, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ],
        taken,
    )


def batched(prompts: list[Any], size: int) -> list[list[Any]]:
    return [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]


def compare(results: Results, hot: Any, cold: Any, folder: Path) -> str:
    call_loans(hot, "place", "local", 0.0)
    answers(hot)  # warms up
    at_home = answers(hot)
    results.add("at home again", difference(at_home, answers(hot)))
    results.add("at home in batches of half the size", difference(at_home, answers(hot, HALF)))
    path = folder / "ring"
    call_loans(cold, "lend", "check", str(path), call_loans(hot, "borrowing"))
    partition = call_loans(hot, "borrow", "check", str(path))
    ring = Ring.attach(path)
    call_loans(hot, "place", "ratio", 1.0)
    # Kernels are compiled for what the first ones have.
    first, before = answers(hot), ring.stats()
    lent, stats = answers(hot), ring.stats()
    results.add("lent", difference(at_home, lent))
    results.add("the ring is", ring.closed.name)
    results.add("tasks", tasks := stats.tasks - before.tasks)
    if HAS_GPU:
        results.add("seconds at home, lent, lent at first", [*seconds(at_home, lent, first)])
        results.add("a wait, us", (stats.wait_ns - before.wait_ns) / max(tasks, 1) / 1e3)
        results.add("a service, us", (stats.service_ns - before.service_ns) / max(tasks, 1) / 1e3)
    call_loans(hot, "end_loan", partition)
    call_loans(cold, "end_lending", "check")
    if not tasks or stats.idled != stats.tasks:
        raise RuntimeError(f"{stats.tasks} tasks, of which {stats.idled} were served")
    longer = f", {lent.seconds / at_home.seconds:.2f} times as long" if HAS_GPU else ""
    same = equal(at_home.tokens, lent.tokens)
    return f"{tasks} tasks, {same} of {PROMPTS * ANSWER} tokens equal{longer}"


def compare_heads(results: Results, hot: Any, cold: Any, folder: Path) -> str:
    """Have the cold engine compute half of the KV heads of all requests, and then none again."""
    at_home = answers(hot)
    path, part = folder / "heads", {"heads": KV_HEADS // 2}
    call_loans(cold, "lend", "heads", str(path), call_loans(hot, "borrowing", part))
    partition = call_loans(hot, "borrow", "heads", str(path), part)
    # Where nothing runs, to look moves them on.
    if (phase := phase_of_part(hot)) != "away":
        raise RuntimeError(f"the heads are not away, but {phase}")
    blocks = call_loans(hot, "loan_state")["own_blocks"]
    first, away = answers(hot), answers(hot)
    call_loans(hot, "drain_loan", partition)
    if (phase := phase_of_part(hot)) != "home":
        raise RuntimeError(f"the heads are not at home again, but {phase}")
    again = answers(hot)
    call_loans(hot, "end_loan", partition)
    call_loans(cold, "end_lending", "heads")
    results.add("own blocks, with half of the heads away", [BLOCKS, blocks])
    results.add("half of the heads away", difference(at_home, away))
    results.add("the heads at home again", difference(at_home, again))
    if HAS_GPU:
        results.add("seconds at home, heads away, at first", [*seconds(at_home, away, first)])
    return f"{equal(at_home.tokens, away.tokens)} with half of the heads away"


def seconds(*of: Answers) -> Iterator[float]:
    return (each.seconds for each in of)


def phase_of_part(hot: Any) -> str:
    (loan,) = call_loans(hot, "loan_state")["loans"]
    return str(loan["shard"]["phase"])


def equal(one: list[list[int]], other: list[list[int]]) -> int:
    """How many tokens are, place by place."""
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return sum(a == b for a, b in pairs)


def agreed(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many are equal before the first that is not."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def difference(one: Answers, other: Answers) -> dict[str, Any]:
    """How many tokens are equal, and how far apart log probabilities are before the first other."""
    apart = []
    for place, (tokens, others) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        pairs = zip(one.log_probabilities[place], other.log_probabilities[place], strict=True)
        apart += [abs(a - b) for a, b in islice(pairs, agreed(tokens, others))]
    return {
        "tokens equal, of": [equal(one.tokens, other.tokens), PROMPTS * ANSWER],
        "tokens before the first other one": len(apart),
        "log probabilities apart, median and greatest": [statistics.median(apart), max(apart)],
    }


def engines(results: Results) -> None:
    os.environ["VLLM_KV_CACHE_LAYOUT"] = os.environ.get("LAYOUT") or "LHBNC"
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

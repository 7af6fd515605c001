"""One engine as the platform makes it for a GPU, beside vLLM's own: tokens and times.

Random weights of Llama-3-8B's shape and four layers. Measured are greedy answers of both, a prefill
that the KV store has, requests that are preempted, and sleep. Without a GPU a small model computes
on CPUs, where engines do not sleep. Graphs are a step of their own, as vLLM compiles for long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.gpu.step import HAS_GPU, Results, main, spread

# isort: split
import torch

from benchmarks.engine import BLOCK_TOKENS, end, engine_options, offline_engine, running_store
from benchmarks.gpu.engines import BLOCK_BYTES, DTYPE, equal, save_model
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Done, Flush
from loomserve.platform.devices.gpus import FREE_AT_START

PROMPTS, PROMPT, ANSWER = (16, 1025, 64) if HAS_GPU else (4, 65, 40)
"""Of a prompt that is cached, a step computes one token, which vLLM replays as one whole graph."""
FITTING = PROMPTS // 2
"""Prompts of which all fit into the engine's KV memory with their answers."""
CONTEXT = 2 * (PROMPT - 1)
BLOCKS = 1 + PROMPTS * (1 + PROMPT // BLOCK_TOKENS) + PROMPTS // 2
"""Room for all prompts, and not for all their answers."""
STORE_BYTES = 2**30 if HAS_GPU else 2**26
RUNS = 5 if HAS_GPU else 1
ON_DEVICE: dict[str, Any] = {"gpu_memory_utilization": FREE_AT_START} if HAS_GPU else {}
WORKERS = {
    True: "loomserve.platform.engine.resumption.gpu_worker.ResumingGpuWorker",
    False: "loomserve.platform.engine.worker.NonSpinningWorker",
}

OURS = engine_options(WORKERS[HAS_GPU], {"preemption": "adaptive", "swap_bytes": STORE_BYTES // 2})


class Answers(NamedTuple):
    """Greedy ones to prompts that came together."""

    tokens: list[list[int]]
    cached: int
    seconds: float


def answers(llm: Any, prompts: int, tokens: int = ANSWER) -> Answers:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    source = random.Random(0)
    asked = [[source.randrange(512) for _ in range(PROMPT)] for _ in range(prompts)]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in asked], greedy, use_tqdm=False
    )
    seconds = time.perf_counter() - begin
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return Answers(found, sum(output.num_cached_tokens for output in outputs), seconds)


def fresh(llm: Any, prompts: int, tokens: int = ANSWER) -> Answers:
    """Answers of which the engine's own prefix cache knows nothing."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied")
    return answers(llm, prompts, tokens)


@contextmanager
def started(
    model: Path, store: dict[str, Any] | None, ours: bool = True, **options: Any
) -> Iterator[Any]:
    llm = offline_engine(
        str(model),
        store,
        dtype=DTYPE,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=BLOCKS * BLOCK_BYTES,
        max_model_len=CONTEXT,
        max_num_seqs=PROMPTS,
        disable_log_stats=False,
        **ON_DEVICE,
        **(OURS if ours else {}),
        **options,
    )
    try:
        yield llm
    finally:
        end(llm)


def flush(store: StoreOptions) -> None:
    with closing(StoreClient(store.address, timeout_ms=10_000)) as client:
        client.ask(Flush(""), Done)


def both(llm: Any) -> tuple[Answers, Answers]:
    """Answers of which nothing is cached, and then with the engine's own prefix cache."""
    return fresh(llm, FITTING), answers(llm, FITTING)


def compare(results: Results, llm: Any, stock: tuple[Answers, Answers]) -> None:
    """Answers beside vLLM's, with as many tokens of the prompts computed: those round alike."""
    whole, cached = stock
    first, again = (fresh(llm, FITTING) for _ in range(2))
    of = FITTING * ANSWER
    results.add("tokens equal to vLLM's, of", [equal(whole.tokens, first.tokens), of])
    results.add("tokens equal with KV from the store, of", [equal(cached.tokens, again.tokens), of])
    results.add(
        "prompt tokens from the store, and from vLLM's cache", [again.cached, cached.cached]
    )
    if again.cached != cached.cached:
        raise RuntimeError("the store had other prompts than vLLM's own prefix cache")


def times(llm: Any, prepare: Callable[[], object], tokens: int = 1) -> dict[str, float]:
    """Milliseconds of all prompts that fit."""
    taken = []
    for _ in range(RUNS):
        prepare()
        taken.append(1000 * fresh(llm, FITTING, tokens).seconds)
    return spread(taken)


def preempted(results: Results, llm: Any) -> None:
    """More than fit: each answer comes whole, whoever was preempted."""
    before = preemptions(llm)
    found = fresh(llm, PROMPTS)
    results.add("requests preempted", preemptions(llm) - before)
    if any(len(tokens) != ANSWER for tokens in found.tokens):
        raise RuntimeError("an answer is short")
    results.add("seconds with preemption", found.seconds)


def preemptions(llm: Any) -> int:
    return sum(
        metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )


def taken(llm: Any) -> list[float]:
    """MiB of the GPU: as the engine's worker says of itself, and as the driver says of all."""
    free, total = torch.cuda.mem_get_info()
    (own,) = llm.collective_rpc("taken_bytes")
    return [own / 2**20, (total - free) / 2**20]


def sleep(llm: Any) -> dict[str, Any]:
    """Memory that sleep of level 1 gives back, and answers after it."""
    before = fresh(llm, FITTING)
    of_awake = taken(llm)
    begin = time.perf_counter()
    llm.sleep(level=1)
    asleep = time.perf_counter()
    of_asleep = taken(llm)
    woken = time.perf_counter()
    llm.wake_up()
    awake = time.perf_counter()
    after = fresh(llm, FITTING)
    return {
        "MiB taken awake, by the worker's and the driver's count": of_awake,
        "MiB taken asleep, likewise": of_asleep,
        "MiB given back": of_awake[1] - of_asleep[1],
        "ms to sleep, to wake": [1000 * (asleep - begin), 1000 * (awake - woken)],
        "tokens equal after it, of": [equal(before.tokens, after.tokens), FITTING * ANSWER],
    }


def serve(results: Results) -> None:
    with (
        TemporaryDirectory(dir="/dev/shm") as name,
        running_store(Path(name), STORE_BYTES) as store,
    ):
        model = Path(name, "model")
        save_model(model, CONTEXT)
        with started(model, None, ours=False) as llm:
            stock = both(llm)
            for how, one, other in zip(("", " with its cache"), stock, both(llm), strict=True):
                same = equal(one.tokens, other.tokens)
                name = f"tokens equal of two runs of vLLM's{how}, of"
                results.add(name, [same, FITTING * ANSWER])
            if HAS_GPU:
                results.add("vLLM's, ms of prefills", times(llm, lambda: None))
                results.add("vLLM's, ms of answers", times(llm, lambda: None, ANSWER))
        awake = {"enable_sleep_mode": True} if HAS_GPU else {}
        with started(model, store.kv_transfer_config("eager"), **awake) as llm:
            compare(results, llm, stock)
            if HAS_GPU:
                forget = partial(flush, store)
                results.add("ours, ms of prefills, saved", times(llm, forget))
                results.add("ours, ms of prefills from the store", times(llm, lambda: None))
                results.add("ours, ms of answers, from the store", times(llm, lambda: None, ANSWER))
            results.attempt("preemption", partial(preempted, results, llm))
            if HAS_GPU:
                results.attempt("sleep", partial(sleep, llm))
    results.end("an engine of the platform's options answered")


if __name__ == "__main__":
    main(serve)

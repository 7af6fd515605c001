"""How much of each step is the scheduler's, the KV store's and the meter's?

Steps are what a host does beside a GPU: the model computes nothing, and each of its layers calls
only what vLLM has around attention for a KV connector. (Computed on a core, 32 small layers take
20 to 80 ms, and differ by a third from run to run.) Each arm is one more part of ours on vLLM's own
engine, which also stands with its own offloading connector, whose worker copies nothing, as vLLM
has none for CPUs. Processes of all arms are forked from one that has imported vLLM, share a core,
and take turns step by step; the KV store has a process and a core of its own. A figure is the CPU
time of a process in a step that decodes for so many requests, over that of vLLM's own engine beside
it: the median of all steps, or the mean, in which those that save blocks weigh.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from operator import sub
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.engine import (
    BLOCK_TOKENS,
    ONE_PROCESS,
    engine_options,
    running_store,
    save_llama,
)
from benchmarks.harness import Measured, parser_of, rotated, run, spread
from loomserve.kvstore.server.options import StoreOptions

ARMS = ("vllm", "offloading", "scheduler", "store", "served")
LAYERS, REQUESTS = (2, 32), (8, 32, 128, 256)
PROMPT, ANSWER, CONTEXT = 20, 140, 256
STORE_BYTES = 2**28
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": STORE_BYTES,
        "spec_name": "UncopiedSpec",
        "spec_module_path": "benchmarks.uncopied",
    },
}
OURS = engine_options(
    "loomserve.platform.engine.worker.NonSpinningWorker",
    {"preemption": "adaptive", "swap_bytes": STORE_BYTES // 2},
)
Of = Callable[[Iterable[float]], float]
_core: Any
_source: random.Random


def start_engine(arm: str, model: Path, folder: Path, store: StoreOptions) -> None:
    """Make the engine of this process."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    from loomserve.platform.engine.core.messages import EngineStart
    from loomserve.platform.engine.core.served_core import ServedEngineCore
    from loomserve.platform.run.engine_address import EngineAddress

    torch.set_num_threads(1)
    own = arm in ("vllm", "offloading")
    config = EngineArgs(
        model=str(model),
        kv_transfer_config={
            "offloading": OFFLOADING,
            **dict.fromkeys(("store", "served"), store.kv_transfer_config("tiny")),
        }.get(arm),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=2**29,
        max_model_len=CONTEXT,
        max_num_seqs=max(REQUESTS),
        **(ONE_PROCESS if own else OURS),
    ).create_engine_config()
    executor = Executor.get_class(config)
    global _core, _source
    _source = random.Random(0)
    if arm == "served":
        start = EngineStart(options={}, address=EngineAddress.in_folder(folder))
        _core = ServedEngineCore(config, executor, start)
    else:
        _core = EngineCore(config, executor, log_stats=True)
    compute_nothing(_core.model_executor.driver_worker.model_runner)


def compute_nothing(runner: Any) -> None:
    """Have a model return the same for all tokens, after what its layers call around attention."""
    import torch
    from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

    config = runner.vllm_config
    names = list(config.compilation_config.static_forward_context)
    tokens = config.scheduler_config.max_num_batched_tokens
    nothing = torch.zeros(tokens, config.model_config.get_hidden_size())

    def attention(layer_name: str) -> None:
        """Of one layer."""

    layer = maybe_transfer_kv_layer(attention)

    def forward(input_ids: Any, positions: Any, *_: Any, **__: Any) -> Any:
        for name in names:
            layer(name)
        return nothing[: len(positions)]

    runner.model.forward = forward


def begin(requests: int) -> None:
    """Have this process's engine get so many requests."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    for _ in range(requests):
        request = EngineCoreRequest(
            request_id=str(_source.random()),
            prompt_token_ids=[_source.randrange(512) for _ in range(PROMPT)],
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        _core.add_request(*_core.preprocess_add_request(request))


def step_us(requests: int) -> float | None:
    """Of one step; 0 if it does not decode for all of the requests, None if none is left."""
    if not _core.scheduler.has_unfinished_requests():
        return None
    begun = time.process_time_ns()
    outputs, _ = _core.step_fn()
    took = (time.process_time_ns() - begun) / 1000
    ended = [one for each in (outputs or {}).values() for one in each.outputs]
    return took if len(ended) == requests and not any(one.finished for one in ended) else 0.0


def steps_us(engines: Mapping[str, ProcessPoolExecutor], requests: int) -> dict[str, list[float]]:
    """Of all arms, which take turns step by step: what slows the machine slows them alike."""
    for engine in engines.values():
        engine.submit(begin, requests).result()
    took = defaultdict[str, list[float]](list)
    orders = itertools.cycle([rotated(ARMS, number) for number in range(len(ARMS))])
    while True:
        now = {arm: engines[arm].submit(step_us, requests).result() for arm in next(orders)}
        if not any(each is not None for each in now.values()):
            return {arm: of[2:] for arm, of in took.items()}
        if all(now.values()):
            for arm, us in now.items():
                took[arm].append(us or 0.0)


def turns(model: Path, runs: int) -> dict[str, list[dict[str, list[float]]]]:
    """What steps take, by number of requests, run and arm."""
    fork = multiprocessing.get_context("fork")
    engines = {arm: ProcessPoolExecutor(1, fork) for arm in ARMS}
    for engine in engines.values():
        # A process is forked for its first task: before this one has the store's threads.
        engine.submit(os.sched_setaffinity, 0, {min(os.sched_getaffinity(0))}).result()
    found: dict[str, list[dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as name, running_store(Path(name), STORE_BYTES) as store:
        for arm, engine in engines.items():
            engine.submit(start_engine, arm, model, Path(name), store).result()
        for count in REQUESTS:
            # The first run warms up.
            found[str(count)] = [steps_us(engines, count) for _ in range(1 + runs)][1:]
            print(f"{model.name}, {count} requests: done", flush=True)
        for engine in engines.values():
            # In good order vLLM takes seconds, and nothing of it is needed any more.
            engine.submit(os._exit, 0).exception()
    return found


def added(runs: Sequence[dict[str, list[float]]], arm: str, of: Of) -> Measured:
    """Of each run, what a step takes more than vLLM's own, beside which it ran."""
    return spread(of(map(sub, one[arm], one["vllm"])) for one in runs)


def measured(options: Namespace, folder: Path) -> Mapping[str, Any]:
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_USE_V2_MODEL_RUNNER="0",
        VLLM_LOGGING_LEVEL="ERROR",
        TORCHDYNAMO_DISABLE="1",
    )
    # Its children need not.
    import_module("loomserve.platform.engine.core.served_core")
    figures: dict[str, Any] = {"step_us": {}, "added_us": {}, "added_mean_us": {}}
    for layers in map(str, LAYERS):
        model = folder / f"{layers} layers"
        save_llama(
            model,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=int(layers),
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT,
        )
        found = turns(model, options.runs)
        figures["step_us"][layers] = {
            of: spread(median(one["vllm"]) for one in runs) for of, runs in found.items()
        }
        for name, figure in (("added_us", median), ("added_mean_us", fmean)):
            figures[name][layers] = {
                arm: {of: added(runs, arm, figure) for of, runs in found.items()}
                for arm in ARMS[1:]
            }
    return figures


def main() -> int:
    parser = parser_of("step_overhead", __doc__)
    parser.add_argument("--runs", type=int, default=5, help="of all arms in turn")
    errors = (BrokenProcessPool,)
    return run("step_overhead", parser.parse_args(), measured, errors=errors)


if __name__ == "__main__":
    sys.exit(main())

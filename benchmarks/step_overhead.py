"""How much of each step is the scheduler's, the KV store's and the meter's?

Steps of a Llama of small layers on one core are mostly Python, as steps of a large model are on the
host beside a GPU. Each arm is one more part of ours on vLLM's own engine, which also stands with
its own offloading connector, whose worker copies nothing, as vLLM has none for CPUs. Processes of
all arms are forked from one that has imported vLLM, and take turns; the KV store has a process and
a core of its own. A figure is the CPU time of a process in the median step that decodes for so many
requests; those that save blocks weigh in the mean.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.engine import (
    BLOCK_TOKENS,
    ONE_PROCESS,
    engine_options,
    running_store,
    save_llama,
)
from benchmarks.harness import Measured, in_turns, parser_of, run, spread
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


def step_us(requests: int) -> dict[str, float]:
    """Of this process's steps that decode for all of so many requests, which begin together."""
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
    took = []
    while _core.scheduler.has_unfinished_requests():
        begin = time.process_time_ns()
        outputs, _ = _core.step_fn()
        end = time.process_time_ns()
        ended = [one for each in (outputs or {}).values() for one in each.outputs]
        if len(ended) == requests and not any(one.finished for one in ended):
            took.append((end - begin) / 1000)
    return {"median": statistics.median(took[2:]), "mean": statistics.fmean(took[2:])}


def turns(model: Path, runs: int) -> list[dict[str, Measured]]:
    """Of each run, what steps take by arm and number of requests."""
    fork = multiprocessing.get_context("fork")
    engines = {arm: ProcessPoolExecutor(1, fork) for arm in ARMS}
    for engine in engines.values():
        # A process is forked for its first task: before this one has the store's threads.
        engine.submit(os.sched_setaffinity, 0, {min(os.sched_getaffinity(0))}).result()
    with tempfile.TemporaryDirectory() as name, running_store(Path(name), STORE_BYTES) as store:
        for arm, engine in engines.items():
            engine.submit(start_engine, arm, model, Path(name), store).result()

        def measure(arm: str, _: int) -> Measured:
            return {str(of): engines[arm].submit(step_us, of).result() for of in REQUESTS}

        # The first run warms up.
        found = in_turns(ARMS, 1 + runs, measure, f"{model.name}, ")[1:]
        for engine in engines.values():
            # In good order vLLM takes seconds, and nothing of it is needed any more.
            engine.submit(os._exit, 0).exception()
    return found


def more_than_vllm(runs: list[Measured], arm: str, of: str, figure: str) -> Measured:
    return spread(one[arm][of][figure] - one["vllm"][of][figure] for one in runs)


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
    figures: dict[str, Any] = {"step_us": {}, "added_us": {}, "added_mean_us": {}, "runs": {}}
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
        runs = figures["runs"][layers] = turns(model, options.runs)
        counts = list(map(str, REQUESTS))
        figures["step_us"][layers] = {
            of: spread(one["vllm"][of]["median"] for one in runs) for of in counts
        }
        for name, figure in (("added_us", "median"), ("added_mean_us", "mean")):
            figures[name][layers] = {
                arm: {of: more_than_vllm(runs, arm, of, figure) for of in counts}
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

"""How much of each step is the scheduler's and the KV store's, where computing takes little?

Steps of a Llama of two small layers on one core are mostly Python, as steps of a large model are
on the host beside a GPU. Arms are vLLM's own engine, one with our worker and scheduler, and that
with the KV store, which runs in a process of its own on another core if there is one. Each run
starts a process for each arm in turn; a figure of an arm is the least of its repeats' means over
steps, as whatever else the machine does only adds to a step. Arms are compared within a run.

The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine import end, engine_options, offline_engine, save_llama
from benchmarks.report import Spread
from benchmarks.result_files import machine, publish, said_by
from loomserve.kvstore.server.opening import start_server
from loomserve.kvstore.server.options import StoreOptions

ARMS = ("vllm", "scheduler", "store")
REQUESTS = (8, 32)
PROMPT, ANSWER, CONTEXT = 20, 300, 512
REPEATS = 5
STORE_BYTES = 2**28
OURS = engine_options(
    "loomserve.platform.engine.worker.NonSpinningWorker",
    {"preemption": "adaptive", "swap_bytes": STORE_BYTES // 2},
)


def save_model(folder: Path) -> None:
    save_llama(
        folder,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )


def options_in(folder: Path) -> StoreOptions:
    return StoreOptions(folder=folder, arena=folder / "arena", memory=STORE_BYTES)


def step_us(llm: Any, requests: int) -> float:
    """Mean microseconds of the steps of so many answers that begin together."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    source = random.Random(0)
    asked = [[source.randrange(512) for _ in range(PROMPT)] for _ in range(requests)]
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate([TokensPrompt(prompt_token_ids=one) for one in asked], greedy, use_tqdm=False)
    return 1e6 * (time.perf_counter() - begin) / ANSWER


def serve_arm(arm: str, model: Path, folder: Path) -> None:
    """Print the microseconds of a step by number of requests."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # As the platform binds an engine, whose threads then share the core.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    llm = offline_engine(
        str(model),
        options_in(folder).kv_transfer_config("tiny") if arm == "store" else None,
        dtype="float32",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**26,
        max_model_len=CONTEXT,
        max_num_seqs=max(REQUESTS),
        **({} if arm == "vllm" else OURS),
    )
    step_us(llm, min(REQUESTS))
    found = {str(of): min(step_us(llm, of) for _ in range(REPEATS)) for of in REQUESTS}
    end(llm)
    print(json.dumps(found), flush=True)


def serve_store(folder: Path) -> None:
    start_server(options_in(folder))
    print("up", flush=True)
    sys.stdin.read()


@contextmanager
def running_store(folder: Path) -> Iterator[None]:
    """A store's process, which ends with its input."""
    with subprocess.Popen(
        _command("--serve-store", folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "up":
            raise RuntimeError("the store did not start")
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        try:
            yield
        finally:
            process.kill()


def measured(arm: str, model: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, running_store(Path(name)):
        ran = subprocess.run(
            _command("--arm", arm, model, name), capture_output=True, text=True, check=False
        )
    if ran.returncode:
        raise RuntimeError(f"{arm}: {ran.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def spread(values: Iterable[float]) -> dict[str, Any]:
    return asdict(Spread.of([*values]))


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.step_overhead", *map(str, words)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_overhead", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=3, help="of all arms in turn")
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve-store", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        arm, model, folder = given.arm
        serve_arm(arm, Path(model), Path(folder))
        return
    if given.serve_store:
        serve_store(given.serve_store)
        return
    facts = machine()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        for number in range(given.runs):
            runs.append({arm: measured(arm, Path(name)) for arm in ARMS})
            print(f"run {number + 1}/{given.runs}: {runs[-1]}", flush=True)
    figures = {
        "more_than_vllm_us": {
            arm: {of: spread(run[arm][of] - run["vllm"][of] for run in runs) for of in runs[0][arm]}
            for arm in ARMS[1:]
        },
        "step_us": {
            arm: {of: spread(run[arm][of] for run in runs) for of in runs[0][arm]} for arm in ARMS
        },
        "runs": runs,
    }
    publish("step_overhead", figures, setup=said_by(given, "arm", "serve_store"), facts=facts)


if __name__ == "__main__":
    main()

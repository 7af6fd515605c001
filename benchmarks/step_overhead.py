"""How much of each step is the scheduler's and the KV store's, where computing takes little?

Steps of a Llama of two small layers on one core are mostly Python, as steps of a large model are
on the host beside a GPU. Arms are vLLM's own engine, one with our worker and scheduler, and that
with the KV store, which runs in a process of its own on another core if there is one. Each run
starts a process for each arm in turn; a figure of an arm is the least of its repeats' means over
steps, as whatever else the machine does only adds to a step. Arms are compared within a run.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine import end, engine_options, offline_engine, save_llama
from benchmarks.harness import NotMeasuredError, in_turns, parser_of, run, spread
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


def served(arm: str, model: Path) -> dict[str, float]:
    """Microseconds of a step by number of requests, of an arm in a process of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, running_store(Path(name)):
        ran = subprocess.run(
            _command("--arm", arm, model, name), capture_output=True, text=True, check=False
        )
    if ran.returncode:
        raise NotMeasuredError(f"{arm}: {ran.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.step_overhead", *map(str, words)]


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    save_model(folder)
    runs = in_turns(ARMS, options.runs, lambda arm, _: served(arm, folder))
    counts = list(map(str, REQUESTS))
    return {
        "more_than_vllm_us": {
            arm: {of: spread(one[arm][of] - one["vllm"][of] for one in runs) for of in counts}
            for arm in ARMS[1:]
        },
        "step_us": {
            arm: {of: spread(one[arm][of] for one in runs) for of in counts} for arm in ARMS
        },
        "runs": runs,
    }


def main() -> int:
    parser = parser_of("step_overhead", __doc__)
    parser.add_argument("--runs", type=int, default=3, help="of all arms in turn")
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve-store", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        arm, model, folder = given.arm
        serve_arm(arm, Path(model), Path(folder))
        return 0
    if given.serve_store:
        serve_store(given.serve_store)
        return 0
    return run("step_overhead", given, measured, without=("arm", "serve_store"))


if __name__ == "__main__":
    sys.exit(main())

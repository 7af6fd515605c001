"""The platform on one GPU, beside vLLM's own server: several models, their load, a killed engine.

``loomserve serve`` has three models on the GPU: one of Llama-3-8B's shape and random weights, the
real demo model, and a second name for it that is loaded on demand. Beside it vLLM's own server has
the first one, with the same flags; both stay up, and are loaded in turns. Without a GPU all three
are the demo model, on a core. ``MODEL_RUNNER=2`` in the environment gives the first one vLLM's
second model runner, which vLLM's own server has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
import psutil
import uvloop

from benchmarks import platforms
from benchmarks.engine import save_llama
from benchmarks.gpu.bundle import MODELS
from benchmarks.gpu.engines import agreed
from benchmarks.gpu.step import DEVICE, HAS_GPU, Results, main
from benchmarks.load import Target, closed_loop
from benchmarks.platforms import engine_process
from benchmarks.servers import EngineFlags, ServerFailedError, bare_arm
from loomserve.platform.models import catalog

# isort: split
import torch

MEASURED, DEMO, ON_DEMAND = "measured", "demo", "on-demand"
PORT, BARE_PORT = 18600, 18601
START_S = 240
FLAGS = EngineFlags(
    max_model_len=8192 if HAS_GPU else 2048,
    max_num_batched_tokens=8192 if HAS_GPU else 2048,
    kv_cache_memory_bytes=2**34 if HAS_GPU else 2**28,
    enforce_eager=not HAS_GPU,
)
GRAPHS: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
RUNS = 3 if HAS_GPU else 1
LOADS = {"1": (1, 3.0), "32": (32, 6.0)} if HAS_GPU else {"8": (8, 5.0)}
"""Streams, and seconds of a window."""
ANSWER = 128 if HAS_GPU else 32
FIGURES = {
    "tokens/s": "tokens_per_second",
    "TTFT p50, ms": "ttft_ms_p50",
    "TPOT p50, ms": "tpot_ms_p50",
    "tokens an event": "tokens_per_event",
}
"""Of a window, and what they are called there."""
QUESTION = "What is the capital of France?"
STORY = "Tell me a long story about a ship, its captain and the sea."


def save_measured(folder: Path) -> Path:
    """The model that is loaded, with the demo model's tokenizer."""
    demo = catalog.resolve("demo", Path.cwd())
    assert isinstance(demo, Path)
    if not HAS_GPU:
        return demo
    names = {"architectures", "model_type", "torch_dtype"}
    shape = {key: value for key, value in MODELS["llama-3-8b"].items() if key not in names}
    with torch.device(DEVICE):
        save_llama(folder, "bfloat16", **shape | {"vocab_size": 49152})
    torch.cuda.empty_cache()
    for file in demo.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def platform_config(model: Path) -> dict[str, Any]:
    place = {"kind": "cuda", "gpu": 0} if HAS_GPU else {"cores": [0]}
    flags = FLAGS.options()
    small = {**flags, "max_model_len": 2048, "max_num_seqs": 16, "enforce_eager": True}
    stays = {"sleep_after_s": None, "unload_after_s": None}
    kv = {"kv_cache_memory": 2**30 if HAS_GPU else FLAGS.kv_cache_memory_bytes}
    asked = os.environ.get("MODEL_RUNNER")
    runner = {"model_runner": int(asked)} if HAS_GPU and asked else {}
    demo = {"source": "demo", "devices": ["one"], **kv, "engine": small}
    return {
        "devices": [{"name": "one", **place}],
        "models": [
            {
                "name": MEASURED,
                "source": str(model),
                "devices": ["one"],
                "kv_cache_memory": FLAGS.kv_cache_memory_bytes,
                "engine": {**flags, **({"compilation_config": GRAPHS} if HAS_GPU else {})},
                **runner,
            },
            {"name": DEMO, **demo},
            {"name": ON_DEMAND, **demo, "start": "on_demand", "idle": stays},
        ],
        "kvstore": {"memory": 2**33 if HAS_GPU else 2**28},
        "server": {"host": "127.0.0.1", "port": PORT},
    }


class Platform(platforms.Platform):
    """With a client of its OpenAI API."""

    def __init__(self, config: Mapping[str, Any], logs: Path) -> None:
        super().__init__(config, logs)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def seconds_until(self, name: str, status: str) -> float:
        """Until a model that is told to be so is."""
        begin = time.monotonic()
        self.have(name, status)
        return time.monotonic() - begin

    def ask(self, name: str, text: str, **more: Any) -> str:
        messages: Any = [{"role": "user", "content": text}]
        more = {"temperature": 0, "max_tokens": 32} | more
        answer = self.client.chat.completions.create(model=name, messages=messages, **more)
        return str(answer.choices[0].message.content)

    def stream(self, name: str, text: str, tokens: int) -> Iterator[str]:
        messages: Any = [{"role": "user", "content": text}]
        for chunk in self.client.chat.completions.create(
            model=name, messages=messages, temperature=0, max_tokens=tokens, stream=True
        ):
            if chunk.choices and (said := chunk.choices[0].delta.content):
                yield said


def first_piece_s(platform: Platform, name: str) -> float:
    begin = time.monotonic()
    for _ in platform.stream(name, QUESTION, 4):
        break
    return time.monotonic() - begin


def answers(platform: Platform) -> dict[str, Any]:
    begin = time.monotonic()
    answer = platform.ask(DEMO, QUESTION)
    greedy = time.monotonic()
    platform.ask(DEMO, QUESTION, temperature=0.8)
    sampled = time.monotonic()
    events = platform.client.responses.create(
        model=DEMO, input=QUESTION, temperature=0, max_output_tokens=32, stream=True
    )
    kinds = [event.type for event in events]
    return {
        "the real model's": answer,
        "seconds of the first, of the first sampled one": [greedy - begin, sampled - greedy],
        "events of /v1/responses, and the last one": [len(kinds), kinds[-1]],
    }


def comes_and_goes(platform: Platform) -> dict[str, Any]:
    """A model that is loaded by its first request, sleeps, wakes, and is unloaded."""
    found: dict[str, Any] = {"MiB of the GPU while it is unloaded": taken()}
    found["seconds to the first piece, unloaded"] = first_piece_s(platform, ON_DEMAND)
    found["MiB of the GPU once it is loaded"] = taken()
    if HAS_GPU:
        found["seconds to sleep"] = platform.seconds_until(ON_DEMAND, "asleep")
        found["MiB of the GPU while it sleeps"] = taken()
        found["seconds to the first piece, asleep"] = first_piece_s(platform, ON_DEMAND)
    found["its answer"] = platform.ask(ON_DEMAND, QUESTION)
    found["seconds to unload"] = platform.seconds_until(ON_DEMAND, "unloaded")
    found["MiB of the GPU once it is unloaded"] = taken()
    found["seconds to the first piece, unloaded again"] = first_piece_s(platform, ON_DEMAND)
    return found


def killed(platform: Platform) -> dict[str, Any]:
    """Kill the only engine of a model under a stream, which waits for the next one."""
    undisturbed = list(platform.stream(DEMO, STORY, 300))
    (replica,) = platform.replicas(DEMO)
    pieces, pauses, last = [], [], time.monotonic()
    for piece in platform.stream(DEMO, STORY, 300):
        pieces.append(piece)
        now = time.monotonic()
        pauses.append(now - last)
        last = now
        if len(pieces) == 50:
            engine_process(replica).kill()
    one, other = "".join(pieces), "".join(undisturbed)
    return {
        "characters before the first other one": agreed(one, other),
        "of characters, and until the kill": [len(one), len(other), len("".join(pieces[:50]))],
        "longest pause, s": max(pauses[1:]),
    }


def taken() -> float:
    """MiB of the GPU, by its driver's count."""
    if not HAS_GPU:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 2**20


def processes() -> list[str]:
    """Who has memory of the GPU, and how much."""
    if not HAS_GPU:
        return []
    query = "--query-compute-apps=pid,used_memory"
    told = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    rows = [row.partition(",") for row in told.stdout.splitlines()]
    return [f"{title(pid)}: {memory.strip()}" for pid, _, memory in rows]


def title(pid: str) -> str:
    try:
        return " ".join(psutil.Process(int(pid)).cmdline())[:60]
    except (ValueError, psutil.Error):
        return pid


def loads(results: Results, targets: dict[str, Target]) -> None:
    """The same prompts to each server in turn; each figure is saved as it comes."""
    found: dict[str, dict[str, list[Any]]] = {}
    for run in range(RUNS):
        for name, (streams, seconds) in LOADS.items():
            for whose in sorted(targets, reverse=run % 2 == 1):
                window = uvloop.run(
                    closed_loop(
                        targets[whose], streams=streams, warmup=1.0, seconds=seconds,
                        max_tokens=ANSWER, seed=f"{run}/{name}",
                    )
                )  # fmt: skip
                if window.errors:
                    raise RuntimeError(f"{whose}, {name} streams: {window.errors[0]}")
                one = window.figures()
                figures = {name: one[key] for name, key in FIGURES.items()}
                found.setdefault(name, {}).setdefault(whose, []).append(figures)
                results.add("streams", found)


def platform(results: Results) -> None:
    with TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as stack:
        begin = time.monotonic()
        model = save_measured(Path(name, "model"))
        results.add("seconds to write the model", time.monotonic() - begin)
        logs = Path(sys.argv[1]).parent / "logs"
        more = ["--gpu-memory-utilization=0.01", f"-cc={GRAPHS}".replace("'", '"')]
        (bare,) = bare_arm(
            "vllm", str(model), FLAGS, BARE_PORT, logs, engines=1, more=more if HAS_GPU else ()
        ).servers
        there = Platform(platform_config(model), logs)
        stack.callback(bare.stop)
        bare.start()
        begin = time.monotonic()
        stack.enter_context(there.running(START_S))
        results.add("seconds until all models are ready", time.monotonic() - begin)
        models = len(list(there.client.models.list()))
        results.add("the platform", {"flags": asdict(FLAGS), "models": models})
        results.attempt("answers", partial(answers, there))
        results.add("MiB by process", processes())
        targets = {"Loomserve": Target(there.url, MEASURED)}
        try:
            bare.wait_ready(60)
            targets["vLLM"] = Target(f"http://127.0.0.1:{BARE_PORT}", MEASURED)
        except ServerFailedError as error:
            results.add("vLLM's own server", str(error)[-4000:])
        results.attempt("load", partial(loads, results, targets))
        results.attempt("comes and goes", partial(comes_and_goes, there))
        results.attempt("a killed engine", partial(killed, there))
        results.add("what the platform printed", there.server.tail(20))
    results.end(f"{len(targets)} servers were up and answered")


if __name__ == "__main__":
    main(platform)

"""What do other ways give that serve two models on two cores behind one address?

Each arm has a model on a core, with the same engine options, and is alone on the machine: vLLM's
own servers; those behind vllm-router and behind LiteLLM; Ray Serve LLM, whose tokens pass through
Ray or, with direct streaming, do not; Loomserve, without and with its KV store. All models are
asked at once, then one alone; then nobody asks; then the engine of one is killed under its streams.
Arms take turns, and each figure is told over that of vLLM's own servers of the same run.
``scripts/install_peers.sh`` installs them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop
import yaml

from benchmarks.harness import Measured, NotMeasuredError, in_turns, over, parser_of, run, spread
from benchmarks.load import Outcome, Request, Target, closed_loop, new_session, prompts, send
from benchmarks.platforms import Platform, two_models
from benchmarks.servers import (
    Arm,
    EngineFlags,
    Server,
    ServerFailedError,
    bare_arm,
    computes,
    of_engine,
)
from benchmarks.start import answers, started
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.models import catalog

BASE = "vllm"
ARMS = (BASE, "router", "litellm", "ray", "ray_direct", "loomserve", "loomserve_store")
MODELS = ("measured", "idle")
"""As :func:`bare_arm` and :func:`two_models` call them; here both are asked."""
PORT = 18_460
DOOR = PORT + 5
"""Of what stands before vLLM's servers."""
PEERS = Path(__file__).parents[1] / ".venv-peers"
STORE_BYTES = 2**30
STREAMS, KILLED_STREAMS, KILLED_TOKENS = 8, 8, 80
_UNDER_WAY_S, _BACK_S, _SETTLE_S, _POLL_S = 3.0, 60.0, 10.0, 0.1


@dataclass
class Served:
    """An arm that is up."""

    arm: Arm
    start_s: float

    def cpu_seconds(self) -> tuple[float, float]:
        """Of its engines, and of all else of it."""
        engines = other = 0.0
        for member in (one for server in self.arm.servers for one in server.members()):
            with contextlib.suppress(psutil.NoSuchProcess):
                took = sum(member.cpu_times()[:2])
                if of_engine(member):
                    engines += took
                else:
                    other += took
        return engines, other

    def engines(self) -> list[psutil.Process]:
        members = (one for server in self.arm.servers for one in server.members())
        return [one for one in members if computes(one)]


# Arms


def arm_of(name: str, model: str, flags: EngineFlags, folder: Path) -> Arm:
    """Nothing is started; configurations are written to ``folder``."""
    if name.startswith("loomserve"):
        store = STORE_BYTES if name == "loomserve_store" else None
        written = two_models(model, flags, PORT, store_bytes=store)
        return Platform(written, folder, name).arm(*MODELS)
    if name.startswith("ray"):
        return _ray(name, model, flags, folder)
    bare = bare_arm(name, model, flags, PORT, folder)
    return bare if name == BASE else _behind(name, bare, folder)


def _ray(name: str, model: str, flags: EngineFlags, folder: Path) -> Arm:
    command = [sys.executable, "-m", "benchmarks.ray_llm", str(PORT), model, *flags.arguments()]
    environment = {
        "PYTHONPATH": f"{PEERS / 'ray'}:{Path(__file__).parents[1]}",
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": str(int(name == "ray_direct")),
        # As the platform has it: the machine's memory is not the benchmark's alone.
        "RAY_memory_monitor_refresh_ms": "0",
    }
    server = Server(name, command, environment, PORT, "/v1/models", folder / f"{name}.log")
    targets = (Target(f"http://127.0.0.1:{PORT}", each) for each in MODELS)
    return Arm(name, [server], *targets)


def _behind(name: str, bare: Arm, folder: Path) -> Arm:
    """vLLM's servers behind one door."""
    program = PEERS / "bin" / {"router": "vllm-router", "litellm": "litellm"}[name]
    words = [str(program), "--host", "127.0.0.1", "--port", str(DOOR)]
    environment, ready = {}, "/health"
    if name == "router":
        words += ["--enable-igw", "--policy", "round_robin"]
    else:
        models = [
            {
                "model_name": each.model,
                "litellm_params": {
                    "model": f"hosted_vllm/{each.model}",
                    "api_base": f"{each.url}/v1",
                    "api_key": "-",
                },
            }
            for each in bare.targets
        ]
        (folder / "litellm.yaml").write_text(yaml.safe_dump({"model_list": models}))
        words += ["--config", str(folder / "litellm.yaml")]
        environment = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            # Else it starts with a key only.
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        }
        ready = "/health/liveliness"
    door = Server(name, words, environment, DOOR, ready, folder / f"{name}.log")
    targets = (Target(f"http://127.0.0.1:{DOOR}", each.model) for each in bare.targets)
    return Arm(name, [*bare.servers, door], *targets)


def _tell_router(bare: Sequence[Server]) -> None:
    """Of the servers behind it, which it learns of in no other way."""
    for server, model in zip(bare, MODELS, strict=True):
        said = httpx.post(
            f"http://127.0.0.1:{DOOR}/workers",
            json={
                "url": f"http://127.0.0.1:{server.port}",
                "model_id": model,
                "worker_type": "regular",
            },
            timeout=60,
        )
        said.raise_for_status()


@contextlib.contextmanager
def up(arm: Arm, start_timeout: float) -> Iterator[Served]:
    """Start an arm, wait until each of its models has answered, and end it.

    Raises:
        ServerFailedError: it did not within ``start_timeout`` seconds.
    """

    def on_ready() -> None:
        if arm.name == "router":
            _tell_router(arm.servers[:-1])

    try:
        yield Served(arm, started(arm, arm.targets, start_timeout, on_ready))
    finally:
        for server in reversed(arm.servers):
            server.ask_to_stop()
        for server in arm.servers:
            server.stop()


# Measuring


def load(served: Served, targets: Sequence[Target], seed: str, seconds: float) -> Measured:
    """A window of a closed loop, and the cores that engines and all else had in it."""
    marks: dict[str, tuple[float, tuple[float, float]]] = {}

    def look(name: str) -> None:
        marks[name] = (time.monotonic(), served.cpu_seconds())

    looks = threading.Timer(2, look, ["begin"])
    looks.start()
    window = uvloop.run(
        closed_loop(*targets, streams=STREAMS, warmup=2, seconds=seconds, max_tokens=32, seed=seed)
    )
    looks.join()
    look("end")
    served.arm.answered(window.outcomes)
    (begin, before), (end, after) = marks["begin"], marks["end"]
    engines, other = ((b - a) / (end - begin) for a, b in zip(before, after, strict=True))
    found = window.figures()
    return {
        "tokens_s": found["tokens_per_second"],
        "ttft_ms_p50": found["ttft_ms_p50"],
        "tpot_ms_p50": found["tpot_ms_p50"],
        "requests": found["requests"],
        "engine_cores": engines,
        "other_cores": other,
    }


def killed(served: Served, seed: str) -> Measured:
    """Kill the engine of the first model under its streams.

    Returns:
        How many of its streams broke, of how many, and seconds until it answered again; ``back_s``
        is None where it did not within ``_BACK_S``.
    """
    target = served.arm.target
    source = prompts(seed)

    async def streams() -> tuple[list[Outcome], float | None]:
        async with new_session() as session:
            asked = [
                Request.chat(
                    target.model, [{"role": "user", "content": next(source)}], KILLED_TOKENS
                )
                for _ in range(KILLED_STREAMS)
            ]
            now = time.perf_counter()
            running = [
                asyncio.ensure_future(send(session, target.url, each, now)) for each in asked
            ]
            await asyncio.sleep(_UNDER_WAY_S)
            busiest = await asyncio.to_thread(_busiest, served)
            busiest.kill()
            back = asyncio.create_task(asyncio.to_thread(_back_s, target))
            done, late = await asyncio.wait(running, timeout=_BACK_S)
            for each in late:
                each.cancel()
            return [each.result() for each in done], await back

    outcomes, back_s = uvloop.run(streams())
    whole = sum(one.error is None for one in outcomes)
    return {"lost_streams": KILLED_STREAMS - whole, "back_s": back_s}


def _busiest(served: Served) -> psutil.Process:
    """The engine that computes, while one model alone is asked."""
    before = {each: sum(each.cpu_times()[:2]) for each in served.engines()}
    time.sleep(0.5)
    return max(before, key=lambda each: sum(each.cpu_times()[:2]) - before[each])


def _back_s(target: Target) -> float | None:
    begin = time.monotonic()
    while time.monotonic() < begin + _BACK_S:
        if answers(target):
            return time.monotonic() - begin
        time.sleep(_POLL_S)
    return None


def measure(name: str, number: int, options: argparse.Namespace, folder: Path) -> Measured:
    model = str(catalog.resolve(options.model, Path.cwd()))
    arm = arm_of(name, model, EngineFlags(dtype=options.dtype or cpu_dtype()), folder)
    with up(arm, options.start_timeout) as served:
        load(served, arm.targets, "warm-up", 3)
        every = load(served, arm.targets, f"{number}/all", options.seconds)
        alone = load(served, [arm.target], f"{number}/alone", options.seconds)
        time.sleep(_SETTLE_S)
        rest = {
            "start_s": served.start_s,
            "idle_cores": arm.idle_cores(options.idle_seconds),
            "memory_gib": sum(server.memory_bytes() for server in arm.servers) / 2**30,
        }
        return {
            **{f"all_{figure}": value for figure, value in every.items()},
            **{f"alone_{figure}": value for figure, value in alone.items()},
            **rest,
            **killed(served, f"{number}/killed"),
        }


def figures(arms: Sequence[str], runs: Sequence[dict[str, Measured]]) -> dict[str, Any]:
    """Of the runs in which an arm, and vLLM's own servers beside it, could be measured."""
    whole = {arm: [one for one in runs if one[BASE] and one[arm]] for arm in arms}
    if not whole[BASE]:
        raise ServerFailedError("vLLM's own servers were measured in no run")
    names = list(whole[BASE][0][BASE])
    absolute = {
        arm: {
            name: spread(values)
            for name in names
            if (values := [one[arm][name] for one in of if one[arm][name] is not None])
        }
        for arm, of in whole.items()
        if of
    }
    ratios = {
        arm: {
            name: over(whole[arm], arm, BASE, name)
            for name in names
            if name not in ("lost_streams", "back_s")
        }
        for arm in absolute
        if arm != BASE
    }
    back = {arm: sum(one[arm]["back_s"] is not None for one in whole[arm]) for arm in absolute}
    failed = {arm: len(runs) - len(of) for arm, of in whole.items() if len(of) < len(runs)}
    return {
        "over_vllm": ratios,
        "absolute": absolute,
        "came_back": back,
        "failed_runs": failed,
        "runs": list(runs),
    }


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if not (PEERS / "bin").exists():
        raise ServerFailedError("the peers are not installed: run scripts/install_peers.sh")
    arms = (BASE, *(arm for arm in options.arms if arm != BASE))

    def one(arm: str, number: int) -> Measured:
        """Nothing where it failed, which loses no other arm's figures."""
        try:
            return measure(arm, number, options, folder)
        except NotMeasuredError as error:
            print(error, file=sys.stderr, flush=True)
            return {}

    return figures(arms, in_turns(arms, options.runs, one))


def main() -> int:
    parser = parser_of("peers", __doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--model", default="demo", help="demo, a folder, or a hub id")
    parser.add_argument("--dtype", help="vLLM's dtype of all arms; else what this CPU is fit for")
    parser.add_argument("--runs", type=int, default=5, help="of each arm")
    parser.add_argument("--seconds", type=float, default=15, help="of each window")
    parser.add_argument("--idle-seconds", type=float, default=20, help="left alone, s")
    parser.add_argument("--start-timeout", type=float, default=600, help="for each server, s")
    options = parser.parse_args()
    return run("peers", options, measured, without=("start_timeout",), cores=os.cpu_count())


if __name__ == "__main__":
    sys.exit(main())

"""How long do two engines take to start, and how long does one that was killed?

Two models with an engine each on a core, from the command to the first answer of both: Loomserve,
and beside it in turn two of vLLM's own servers. Then an engine of Loomserve's is killed, and the
time is taken until its model has another. Between them it is left alone, and so is Ray Serve with
as many replicas that do nothing. The first run of an arm fills caches and is not told.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import parser_of, ratios, rotated, run, spread
from benchmarks.load import Target
from benchmarks.platforms import Platform, engine_process, two_models
from benchmarks.servers import Arm, EngineFlags, Server, ServerFailedError, bare_arm
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.models import catalog

PORT = 18420
REPLICAS = "4"  # of Serve: a controller's, a gateway's and two engines'
_BACK_S, _SETTLE_S, _POLL_S = 120.0, 15.0, 0.05


def answers(target: Target) -> bool:
    """Whether a request is answered, not only said to be."""
    body = {"model": target.model, "prompt": "Once upon", "max_tokens": 1, "temperature": 0}
    try:
        said = httpx.post(f"{target.url}/v1/completions", json=body, timeout=60)
    except httpx.HTTPError:
        return False
    return said.status_code == 200


def started(
    arm: Arm,
    targets: Sequence[Target],
    timeout_s: float,
    on_ready: Callable[[], object] = lambda: None,
) -> float:
    """Seconds from the command until each target has answered; ``on_ready`` is called before the
    first is asked.

    Raises:
        ServerFailedError: they did not within ``timeout_s``.
    """
    begin = time.monotonic()
    for server in arm.servers:
        server.start()
    for server in arm.servers:
        server.wait_ready(timeout_s)
    on_ready()
    for target in targets:
        while not answers(target):
            if time.monotonic() > begin + timeout_s:
                raise ServerFailedError(f"{arm.name} does not answer\n{arm.servers[-1].tail()}")
            time.sleep(_POLL_S)
    return time.monotonic() - begin


def kill_engines(platform: Platform, model: str) -> float:
    """Kill all engines of a model; seconds after which it has as many others."""
    gone = {replica["id"] for replica in platform.replicas(model)}
    for replica in platform.replicas(model):
        engine_process(replica).kill()
    begin = time.monotonic()

    def back() -> bool:
        # One that is gone is told of until its silence tells that it is.
        return len({each["id"] for each in platform.replicas(model)} - gone) >= len(gone)

    platform.wait(back, _BACK_S, f"{model} has other engines", every_s=_POLL_S)
    return time.monotonic() - begin


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = str(catalog.resolve(options.model, Path.cwd()))
    flags = EngineFlags(dtype=options.dtype or cpu_dtype())
    took: dict[str, list[float]] = {"vllm": [], "loomserve": [], "back": [], "ray": []}
    idle: dict[str, list[float]] = {"loomserve": [], "ray": []}
    for number in range(options.runs + 1):
        for name in rotated(("loomserve", "vllm", "ray"), number):
            platform = Platform(two_models(model, flags, PORT), folder)
            arm = platform.arm("measured", "idle")
            if name == "vllm":
                arm = bare_arm(name, model, flags, PORT, folder)
            elif name == "ray":
                words = [sys.executable, "-m", "benchmarks.ray_idle", str(PORT), REPLICAS]
                server = Server(name, words, {}, PORT, "/", folder / "ray.log")
                arm = Arm(name, [server], arm.target)
            try:
                # Ray Serve alone has nothing that answers.
                targets = [] if name == "ray" else arm.targets
                took[name].append(started(arm, targets, options.start_timeout))
                if name in idle:
                    time.sleep(_SETTLE_S)
                    idle[name].append(arm.idle_cores(options.idle_seconds))
                if name == "loomserve":
                    took["back"].append(kill_engines(platform, "idle"))
            finally:
                for server in arm.servers:
                    server.stop()
            print(f"run {number}: {name} answers after {took[name][-1]:.1f} s", flush=True)
    vllm, loomserve, back, _ = (of[1:] for of in took.values())
    return {
        "two_engines_ready_s": spread(loomserve),
        "two_vllm_servers_start_s": spread(vllm),
        "start_ratio": ratios(loomserve, vllm),
        "engine_back_s": spread(back),
        "idle_cores_two_models": spread(idle["loomserve"]),
        "idle_cores_ray_serve": spread(idle["ray"]),
        "idle_ratio": ratios(idle["loomserve"], idle["ray"]),
    }


def main() -> int:
    parser = parser_of("start", __doc__)
    parser.add_argument("--model", default="demo", help="demo, a folder, or a hub id")
    parser.add_argument("--dtype", help="vLLM's dtype for both arms; else what this CPU is fit for")
    parser.add_argument("--runs", type=int, default=3, help="of each arm, after a first one")
    parser.add_argument("--idle-seconds", type=float, default=60, help="left alone, s")
    parser.add_argument("--start-timeout", type=float, default=600, help="for each server, s")
    return run("start", parser.parse_args(), measured, without=("start_timeout",))


if __name__ == "__main__":
    sys.exit(main())

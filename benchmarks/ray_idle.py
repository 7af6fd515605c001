"""How much processor time does Ray Serve take at rest, with replicas that do nothing?

As many as a platform of two engines has: a gateway, a controller and two engines' replicas, with
the environment in which Loomserve runs Ray. So much of ``idle_cores`` of ``overhead.py`` is not
Loomserve's own.

The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import psutil

from benchmarks.result_files import machine, publish, said_by
from loomserve.deployments.ray_start import join
from loomserve.platform.nodes.lone_ray import LoneRay
from loomserve.platform.run.folder import RunFolder
from loomserve.platform.run.leftovers import end_run
from loomserve.platform.run.ray_environment import set_environment

_SETTLE_S = 15.0


def start(run: RunFolder, replicas: int) -> None:
    """Ray Serve as the platform has it, with replicas that do nothing."""
    set_environment(run)
    join(LoneRay(run).start({}, lambda: False))
    # Ray reads its environment when it is imported.
    from ray import serve

    serve.start(proxy_location="Disabled")

    class Nothing:
        async def __call__(self) -> None:
            """Nothing."""

    for number in range(replicas):
        serve.run(serve.deployment(Nothing).bind(), name=str(number), route_prefix=None)


def cpu_seconds() -> dict[str, float]:
    """Of this process and its children so far, by what they are."""
    found = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        times = process.cpu_times()
        # Where anything is installed is nobody's affair.
        words = [Path(word).name for word in process.cmdline()]
        found[f"{process.pid} {' '.join(words)[:60]}"] = times.user + times.system
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ray_idle", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60, help="measured")
    options = parser.parse_args()
    facts = machine()
    run = RunFolder.create()
    try:
        start(run, options.replicas)
        time.sleep(_SETTLE_S)
        before = cpu_seconds()
        time.sleep(options.seconds)
        after = cpu_seconds()
    finally:
        end_run(run, children=psutil.Process().children(recursive=True))
    cores = {
        name: round((after[name] - before[name]) / options.seconds, 4)
        for name in before.keys() & after.keys()
    }
    result = {
        "ray_idle_cores": round(sum(cores.values()), 4),
        "by_process": dict(sorted(cores.items(), key=lambda each: -each[1])),
    }
    publish("ray_idle", result, setup=said_by(options), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())

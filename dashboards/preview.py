"""Draw a dashboard from Prometheus' answers, for those who have no Grafana at hand.

Panels have Grafana's places and titles, and look otherwise. ``--help`` says how.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import httpx

from dashboards.panels import COLUMNS, Dashboard, Panel, Query, placed
from dashboards.table import DASHBOARDS

_LINES = 9
"""Of a panel; more are not told apart."""
_HIGH_IN = 0.33
_WIDE_IN = 0.6


@dataclass(frozen=True)
class Line:
    """One series of a panel: Unix seconds and values."""

    name: str
    at_s: Sequence[float]
    values: Sequence[float]


class Answers:
    """What Prometheus says to panels' queries, over the last seconds."""

    def __init__(self, url: str, seconds: float, scrape_s: float) -> None:
        """``seconds``: how far back; ``scrape_s``: how often Prometheus scrapes."""
        self._client = httpx.Client(base_url=url, timeout=60)
        self.end = time.time()
        self.begin = self.end - seconds
        self._step_s = max(scrape_s, seconds / 300)
        self._rate_interval = f"{4 * max(scrape_s, self._step_s):.0f}s"

    def of(self, query: Query) -> list[Line]:
        filled = query.expr.replace("$__rate_interval", self._rate_interval)
        for choice in ("$model", "$device", "$key"):
            filled = filled.replace(choice, ".*")
        answer = self._client.get(
            "/api/v1/query_range",
            params={"query": filled, "start": self.begin, "end": self.end, "step": self._step_s},
        )
        found = answer.raise_for_status().json()["data"]["result"]
        return [_line(query, each) for each in found]


def _line(query: Query, series: Mapping[str, Any]) -> Line:
    # {{model}} is $model to a template.
    legend = Template(query.legend.replace("{{", "${").replace("}}", "}"))
    points = [(at, float(value)) for at, value in series["values"] if value != "NaN"]
    return Line(
        legend.safe_substitute(series["metric"]),
        [at for at, _ in points],
        [value for _, value in points],
    )


def draw(page: Dashboard, answers: Answers, file: Path) -> None:
    """Draw a dashboard's panels where Grafana places them."""
    import matplotlib as mpl

    # The same figures give the same file.
    mpl.rcParams["svg.hashsalt"] = page.name
    mpl.rcParams["font.size"] = 7
    mpl.use("agg")
    from matplotlib import pyplot

    places = list(placed(page.panels))
    rows = max(y + panel.high for panel, _, y in places)
    figure = pyplot.figure(figsize=(COLUMNS * _WIDE_IN, rows * _HIGH_IN))
    for panel, x, y in places:
        axes = figure.add_axes(
            (
                (x + 1.0) / COLUMNS,
                1 - (y + panel.high - 1.0) / rows,
                (panel.wide - 1.5) / COLUMNS,
                (panel.high - 2.6) / rows,
            )
        )
        axes.set_title(textwrap.fill(panel.question, panel.wide * 6), fontsize=8, loc="left")
        lines = [line for query in panel.queries for line in answers.of(query)]
        if panel.kind == "stat":
            _number(axes, panel, lines)
        else:
            _lines(axes, panel, lines, answers)
    figure.savefig(file, metadata={} if file.suffix == ".png" else {"Date": None}, dpi=110)
    pyplot.close(figure)


def _number(axes: Any, panel: Panel, lines: Sequence[Line]) -> None:
    axes.axis("off")
    values = lines[0].values if lines else ()
    shown = shown_as(values[-1], panel.unit) if values else "no data"
    axes.text(0.5, 0.4, shown, fontsize=18, ha="center", va="center", transform=axes.transAxes)


def _lines(axes: Any, panel: Panel, lines: Sequence[Line], answers: Answers) -> None:
    axes.set_xlim(0, answers.end - answers.begin)
    axes.grid(alpha=0.3)
    axes.set_ylabel("" if panel.unit == "none" else panel.unit)
    for line in lines[:_LINES]:
        axes.plot([at - answers.begin for at in line.at_s], line.values, label=line.name, lw=1)
    if panel.least is not None:
        axes.set_ylim(bottom=panel.least)
    if lines:
        axes.legend(fontsize=6, loc="upper left", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes)


def shown_as(value: float, unit: str) -> str:
    """A number as a person reads it."""
    match unit:
        case "percentunit":
            return f"{value:.1%}"
        case "s":
            return f"{value:.3g} s"
        case "reqps" | "ops":
            return f"{value:.3g}/s"
        case _:
            return f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", choices=[each.name for each in DASHBOARDS])
    parser.add_argument("file", type=Path, help="such as overview.png")
    parser.add_argument("--prometheus", default="http://localhost:9090")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--scrape-s", type=float, default=15, help="how often it scrapes")
    given = parser.parse_args()
    page = next(each for each in DASHBOARDS if each.name == given.page)
    draw(page, Answers(given.prometheus, given.minutes * 60, given.scrape_s), given.file)


if __name__ == "__main__":
    main()

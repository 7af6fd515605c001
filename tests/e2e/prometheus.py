"""A real Prometheus that scrapes a test's platform, where there is one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dashboards.panels import Query
from dashboards.preview import Answers, draw
from dashboards.table import DASHBOARDS
from tests.e2e import scraped
from tests.e2e.conftest import Platform
from tests.e2e.scraped import Prometheus
from tests.unit.dashboards.catalog import filled

__all__ = ["SCRAPE_S", "Prometheus", "answers", "picture", "scraping"]

SCRAPE_S = 2
# As Grafana works it out.
RATE_INTERVAL = f"{4 * SCRAPE_S}s"


@contextmanager
def scraping(platform: Platform, folder: Path, rules: Path) -> Iterator[Prometheus]:
    """Prometheus, from its first scrape of the platform on."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus here (Debian: apt install prometheus)")
    url, token = platform.operators_url or platform.url, platform.admin_token
    with scraped.scraping(url, folder, rules, token=token, scrape_s=SCRAPE_S) as found:
        yield found


def answers(of: Prometheus, query: Query, begin: float, end: float) -> list[dict[str, Any]]:
    """The series of a panel's query, as Grafana asks it, over a span of Unix seconds."""
    expression = filled(query.expr, **{"$__rate_interval": RATE_INTERVAL})
    return of.over(expression, begin, end)


PICTURES = os.environ.get("LOOMSERVE_DASHBOARD_PICTURES")
"""A folder for pictures of dashboards, as docs/metrics.md shows them; none: there are none."""


def picture(of: Prometheus, begin: float, *names: str) -> None:
    """Draw dashboards by what was scraped since then, if there is a folder for them."""
    for page in DASHBOARDS if PICTURES else ():
        if page.name in names:
            shown = Answers(of.url, time.time() - begin, SCRAPE_S)
            draw(page, shown, Path(str(PICTURES)) / f"{page.name}.png")

"""The page's table of gains is what its formula gives of its figures."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[4] / "docs/lending_gpus.md").read_text()
OWN_ROWS = LENT_ROWS = 64


def figure(name: str) -> float:
    (found,) = re.findall(rf"\b{name} (\d+)(?: µs)?,", PAGE)
    return float(found)


def taken(link: float, pickup: float) -> float:
    answered = link + pickup + figure("service")
    return figure("rest") + figure("post") + max(figure("own"), answered) + figure("fetch")


def test_gains_are_those_of_the_formula() -> None:
    (head,) = re.findall(r"^\| link \|.+$", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| (?:NVLink|PCIe) \d.+$", PAGE, re.MULTILINE)
    pickups = [float(each) for each in re.findall(r"(\d+)(?: µs of pickup)? \|", head)]
    assert len(pickups) == 4
    assert len(rows) == 3
    alone = figure("rest") + figure("own")
    for row in rows:
        link = float(re.findall(r"\((\d+) µs\)", row)[0])
        *gains, even = [cell.strip() for cell in row.split("|")[2:-1]]
        rise = (OWN_ROWS + LENT_ROWS) / OWN_ROWS
        assert gains == [f"{rise * alone / taken(link, pickup):.2f}" for pickup in pickups]
        assert rise * alone / taken(link, float(even.split()[0])) == 1

"""What every benchmark shares: its command, comparisons of arms run by run, its headline.

A benchmark is a question. It names its arms as data, measures them in turn, and returns figures:

    def main() -> int:
        return run("documents", arguments(), measured)

``headlines.toml`` says which of them are its answer, by flat names, and what is aimed at.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.result_files import machine, publish

T = TypeVar("T")


class NotMeasuredError(Exception):
    """A request failed or a server went away, so that the figures mean nothing."""


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


def spread(values: Iterable[float]) -> dict[str, Any]:
    return asdict(Spread.of(list(values)))


def ratios(ones: Iterable[float], others: Iterable[float]) -> dict[str, Any]:
    return asdict(Spread.of_ratios(list(ones), list(others)))


def medians(spreads: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each name's median; under ``spread``, its least and greatest."""
    found: dict[str, Any] = {name: of["median"] for name, of in spreads.items()}
    return found | {"spread": {name: [of["min"], of["max"]] for name, of in spreads.items()}}


def over(
    runs: Sequence[Mapping[str, Mapping[str, Any]]], arm: str, base: str, figure: str
) -> dict[str, Any] | None:
    """An arm's figure over another arm's of the same run; None: the other had none in some run.

    Args:
        runs: Figures of each run, by arm.
    """
    if not all(run[base][figure] for run in runs):
        return None
    return ratios([run[arm][figure] for run in runs], [run[base][figure] for run in runs])


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


def rotated(arms: Sequence[T], run: int) -> list[T]:
    """The arms, another one first in each run, so that a steady drift favours none.

    Two arms go A B, B A, A B, …
    """
    first = run % len(arms)
    return [*arms[first:], *arms[:first]]


Measured = dict[str, Any]
"""Figures of one arm in one run."""


def in_turns(
    arms: Sequence[str], runs: int, measure: Callable[[str, int], Measured], what: str = ""
) -> list[dict[str, Measured]]:
    """Each run's figures, by arm; arms take turns at going first.

    Args:
        measure: Gets an arm and the number of the run.
        what: Stands before what is printed as it comes.
    """
    found = []
    for number in range(runs):
        of_run = {}
        for arm in rotated(arms, number):
            of_run[arm] = measure(arm, number)
            print(f"{what}run {number + 1}/{runs}, {arm}: {of_run[arm]}", flush=True)
        found.append({arm: of_run[arm] for arm in arms})
    return found


class Figure(NamedTuple):
    """One number of a headline: where it is among the figures, and what is aimed at, if anything.

    Attributes:
        path: Names, one within the other, with ``/`` between them; of a spread, its median.
        must: Whether the command fails if what is aimed at is missed.
    """

    path: str
    least: float | None = None
    most: float | None = None
    must: bool = False

    def value(self, figures: Mapping[str, Any]) -> float | None:
        """None: the arm was not run, or had nothing to compare."""
        found: Any = figures
        for name in self.path.split("/"):
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        if isinstance(found, Mapping):
            found = found.get("median")
        return None if found is None else float(found)

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )


Headline = Mapping[str, Figure]
_HEADLINES = Path(__file__).with_name("headlines.toml")


def headline_of(name: str) -> Headline:
    """Of a benchmark, as ``headlines.toml`` has it."""
    stated = tomllib.loads(_HEADLINES.read_text(encoding="utf-8"))
    return {each: Figure(**of) for each, of in stated[name].items()}


def headline(names: Headline, figures: Mapping[str, Any]) -> dict[str, Any]:
    """``headline``, and which ``goals`` it met."""
    found = {name: value for name, of in names.items() if (value := of.value(figures)) is not None}
    goals = {
        name: {
            **({} if of.least is None else {"least": of.least}),
            **({} if of.most is None else {"most": of.most}),
            "met": of.met(found[name]),
        }
        for name, of in names.items()
        if name in found and (of.least, of.most) != (None, None)
    }
    return {"headline": found, "goals": goals}


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """For a benchmark of this name and docstring, whose first sentence is its question."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=" ".join((doc or "").partition("\n\n")[0].split()),
    )


def run(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Path], Mapping[str, Any]],
    *,
    headline_as: str | None = None,
    without: Sequence[str] = (),
    errors: tuple[type[Exception], ...] = (),
    **setup: Any,
) -> int:
    """Measure, and publish what was found.

    Args:
        measure: Gets the options and a folder for configurations and logs, which stays if it fails.
        headline_as: The benchmark whose headline it has, if that is not its own.
        without: Options that no figure depends on.
        errors: That mean that nothing was measured, beside :class:`NotMeasuredError`.
        setup: What else the figures depend on.

    Returns:
        The command's exit code: 1 if nothing was measured, or what must be met is not.
    """
    failures: tuple[type[Exception], ...] = (NotMeasuredError, TimeoutError, *errors)
    facts = machine()
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    print(f"logs in {folder}", flush=True)
    try:
        figures = measure(options, folder)
    except failures as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    said = {key: value for key, value in vars(options).items() if key not in without}
    answer = headline_of(headline_as or name)
    answered = headline(answer, figures)
    for goal, of in answered["goals"].items():
        print(f"{goal} {answered['headline'][goal]:.3g}: {of}", flush=True)
    publish(name, {**answered, **figures}, setup={**said, **setup}, facts=facts)
    shutil.rmtree(folder, ignore_errors=True)
    musts = {of for of, each in answer.items() if each.must} & answered["goals"].keys()
    return int(not all(answered["goals"][of]["met"] for of in musts))

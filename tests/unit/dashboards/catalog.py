"""The series that expressions may ask for, and what an expression asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql

ROOT = Path(__file__).parents[3]

# Of vLLM's metrics on the platform's page: those of an engine, and which are histograms.
_VLLM_LABELS = frozenset({"model", "replica", "device", "model_name", "engine"})
_VLLM_OWN = {"vllm:request_success_total": frozenset({"finished_reason"})}
_VLLM_HISTOGRAMS = re.compile(r"_(seconds|tokens)$")
_OTHERS = {
    # Prometheus' own.
    "ALERTS": frozenset({"alertname", "alertstate", "severity"}),
    "up": frozenset({"job", "instance"}),
}
_FILLED = {
    "$__rate_interval": "1m",
    "$model": ".*",
    "$device": ".*",
    "$key": ".*",
}


def filled(expression: str, **instead: str) -> str:
    """A panel's expression as Grafana sends it, with all values of its lists chosen."""
    for name, value in {**_FILLED, **instead}.items():
        expression = expression.replace(name, value)
    return expression


def catalog() -> dict[str, frozenset[str]]:
    """Labels of each series, of the metrics that ``docs/metrics.md`` describes and of others."""
    page = (ROOT / "docs/metrics.md").read_text()
    series: dict[str, frozenset[str]] = dict(_OTHERS)
    for name, labels, meaning in re.findall(
        r"^\| `(loomserve_\w+)` \| ([^|]*) \| ([^|]*) \|", page, re.MULTILINE
    ):
        own = frozenset(re.findall(r"`(\w+)`", labels))
        series |= _of_kind(name, own, histogram=meaning.startswith("Histogram"))
    for name in re.findall(r"^\| `(vllm:\w+)` \|", page, re.MULTILINE):
        own = _VLLM_LABELS | _VLLM_OWN.get(name, frozenset())
        series |= _of_kind(name, own, histogram=bool(_VLLM_HISTOGRAMS.search(name)))
    return series


def _of_kind(name: str, labels: frozenset[str], *, histogram: bool) -> dict[str, frozenset[str]]:
    if not histogram:
        return {name: labels}
    return {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}


def parts(expression: promql.Expr) -> Iterator[promql.Expr]:
    """The expression and all that it is made of."""
    yield expression
    below = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    below += getattr(expression, "args", None) or []
    for each in below:
        if isinstance(each, promql.Expr):
            yield from parts(each)


def selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    """What it reads, in the order of the text."""
    return [each for each in parts(expression) if isinstance(each, promql.VectorSelector)]


def problems(text: str, known: dict[str, frozenset[str]]) -> list[str]:
    """What is wrong with an expression: series, matched labels or groups that there are not.

    Raises:
        ValueError: it is no PromQL.
    """
    found: list[str] = []
    whole = promql.parse(text)
    for each in selectors(whole):
        if each.name not in known:
            found.append(f"there is no series {each.name}")
            continue
        matched = {matcher.name for matcher in each.matchers.matchers}
        found += [f"{each.name} has no label {label}" for label in matched - known[each.name]]
    for each in parts(whole):
        grouped = set(each.modifier.labels) if _groups(each) else set()
        for read in selectors(each) if grouped else ():
            lost = grouped - known.get(str(read.name), frozenset())
            found += [f"{read.name} cannot be grouped by {label}" for label in lost]
    return found


def groups(text: str) -> set[str]:
    """Labels that the outermost aggregations leave to an expression's result."""
    for each in parts(promql.parse(text)):
        if _groups(each):
            return set(each.modifier.labels)
        if isinstance(each, promql.AggregateExpr):
            return set()
    return set()


def _groups(expression: promql.Expr) -> bool:
    return isinstance(expression, promql.AggregateExpr) and expression.modifier is not None

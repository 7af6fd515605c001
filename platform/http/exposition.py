"""Merges the metrics of many processes into one page of Prometheus' text format 0.0.4.

It reads by line: ``prometheus_client.parser`` looks at each character in Python and takes several
times as long, on the core of the token traffic. The format:
https://prometheus.io/docs/instrumenting/exposition_formats/#text-format-details
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*[ \t]*=[ \t]*"(?:[^"\\]|\\[\\n"])*"'
_VALUE = r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[iI]nf|[nN]a[nN])"
_SAMPLE = re.compile(
    rf"[ \t]*({_NAME})"
    rf"(?:[ \t]*\{{[ \t]*((?:{_LABEL}[ \t]*(?:,[ \t]*{_LABEL}[ \t]*)*,?)?)[ \t]*\}}[ \t]*|[ \t]+)"
    rf"({_VALUE}(?:[ \t]+-?\d+)?)[ \t]*",
    re.ASCII,
)
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"')
_COMMENT = re.compile(rf"[ \t]*#[ \t]+(HELP|TYPE)[ \t]+({_NAME})(?:[ \t]+(.*))?")
_SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
    "untyped": ("",),
}

_UP = "loomserve_scrape_up"
_UP_HELP = "1: the process's metrics are on this page; 0: they could not be read."

# Labels whose values are still escaped.
_Labels = tuple[tuple[str, str], ...]
# What two samples must not share: a name and a set of labels.
_Series = tuple[str, frozenset[tuple[str, str]]]


class _InvalidPartError(ValueError):
    """An exposition is not valid by itself, or contradicts one before it."""


@dataclass
class _Family:
    type: str = ""
    help: str | None = None
    samples: list[str] = field(default_factory=list)
    series: list[_Series] = field(default_factory=list)


class _Page:
    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._series: set[_Series] = set()

    def add(self, part: Mapping[str, _Family]) -> None:
        """Add an exposition, whole or not at all."""
        series = [one for family in part.values() for one in family.series]
        added = set(series)
        if len(added) < len(series) or not added.isdisjoint(self._series):
            raise _InvalidPartError("a sample is given twice")
        for name, new in part.items():
            old = self._families.get(name)
            if old is not None and new.type != old.type:
                raise _InvalidPartError(f"{name} is a {new.type} here and a {old.type} elsewhere")
        for name, new in part.items():
            family = self._families.setdefault(name, _Family(new.type))
            family.help = family.help or new.help
            family.samples += new.samples
        self._series |= added

    def render(self) -> str:
        lines: list[str] = []
        for name, family in self._families.items():
            if family.help:
                lines.append(f"# HELP {name} {family.help}")
            lines.append(f"# TYPE {name} {family.type}")
            lines += family.samples
        return "\n".join([*lines, ""])


def merge(parts: Sequence[tuple[Mapping[str, str], str | None]]) -> str:
    """Merge expositions into one; each has the labels to add to its samples, and None if not
    readable.

    Label sets must differ between processes. A sample's own label of an added name is kept as
    ``exported_<name>``, as Prometheus does. A part that is not valid, or contradicts one before it,
    is left out; ``loomserve_scrape_up`` says for each whether it is in.
    """
    page = _Page()
    up: dict[str, int] = {}
    for labels, text in parts:
        added = tuple((name, _escape(value)) for name, value in labels.items())
        try:
            if text is None:
                raise _InvalidPartError("not to be had")
            page.add(_read(text, added))
        except _InvalidPartError:
            up[_render(added)] = 0
        else:
            up.setdefault(_render(added), 1)
    if up:
        samples = [f"{_UP}{labels} {value}" for labels, value in up.items()]
        page.add({_UP: _Family("gauge", _UP_HELP, samples)})
    return page.render()


def split_gauges(text: str) -> tuple[str, str]:
    """An exposition's families but for gauges, and its gauges; a family's lines stand together."""
    parts: tuple[list[str], list[str]] = ([], [])
    comments: list[str] = []
    chosen = parts[0]
    for line in text.split("\n"):
        if line.startswith("# HELP "):
            comments.append(line)
            continue
        if line.startswith("# TYPE "):
            chosen = parts[line.endswith(" gauge")]
        chosen += [*comments, line]
        comments.clear()
    return "\n".join(parts[0]), "\n".join(parts[1])


def _read(text: str, added: _Labels) -> dict[str, _Family]:
    families: dict[str, _Family] = {}
    owner: dict[str, _Family] = {}
    # Not splitlines(): label values may hold other line separators than "\n".
    for line in text.split("\n"):
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            _read_other(line, families, owner)
            continue
        name, own, value = sample.groups()
        family = owner.get(name)
        if family is None:
            family = families.setdefault(name, _Family())
            if family.type:
                raise _InvalidPartError(f"no sample of a {family.type}: {line}")
            family.type = "untyped"
            owner[name] = family
        label_text, label_set = _with_labels(own or "", added)
        family.samples.append(f"{name}{label_text} {value}")
        family.series.append((name, label_set))
    return {name: family for name, family in families.items() if family.samples}


def _read_other(line: str, families: dict[str, _Family], owner: dict[str, _Family]) -> None:
    comment = _COMMENT.fullmatch(line)
    if comment is None:
        if line.strip(" \t") and not line.lstrip(" \t").startswith("#"):
            raise _InvalidPartError(f"neither a sample nor a comment: {line}")
        return
    what, name, rest = comment.groups()
    family = families.setdefault(name, _Family())
    if what == "HELP":
        family.help = family.help or rest
        return
    kind = (rest or "").strip(" \t")
    if kind not in _SUFFIXES or family.samples or family.type not in {"", kind}:
        raise _InvalidPartError(f"unknown, late or second type: {line}")
    family.type = kind
    for suffix in _SUFFIXES[kind]:
        owner[name + suffix] = family


# A process repeats its label sets in many families and in every scrape.
@lru_cache(maxsize=16384)
def _with_labels(own: str, added: _Labels) -> tuple[str, frozenset[tuple[str, str]]]:
    taken = {name for name, _ in added}
    pairs = [(f"exported_{n}" if n in taken else n, v) for n, v in _PAIR.findall(own)]
    if len({name for name, _ in pairs} | taken) < len(pairs) + len(taken):
        raise _InvalidPartError(f"a label is given twice: {own}")
    labels = (*added, *pairs)
    return _render(labels), frozenset(labels)


def _render(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

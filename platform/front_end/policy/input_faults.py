"""The error for a client whose request vLLM's validators refuse: short, and of one class only.

A message may be of six classes and a response's input item of sixty, and a validator lists the
faults of each. Only those of the class that ``role`` or ``type`` names are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_FAULTS = 5
"""Shown of one request."""
MOST_CHARACTERS = 300
"""Of one fault."""
_MOST_PATH = 100
_DISCRIMINATORS = ("type", "role", "object")
_SHOULD_BE = "Input should be "

Step = str | int


def class_name(number: int) -> str:
    """Stands for one of the classes that a value may be of, among the steps to a fault."""
    return f"\0{number}"


def is_class(step: Step) -> bool:
    """Whether it is such a name, and nothing that a request has."""
    return isinstance(step, str) and step.startswith("\0")


@dataclass(frozen=True)
class InputFault:
    """One thing that is wrong, as pydantic has it."""

    where: tuple[Step, ...]
    """Fields and places in lists, and between them the classes that were tried, by
    :func:`class_name` or as pydantic names them."""
    kind: str
    """Pydantic's name for it, such as ``missing``."""
    says: str


@dataclass(frozen=True)
class ReportedFault:
    """A fault as a client sees it."""

    param: str | None
    """Its field, as ``messages[2].content``."""
    says: str

    def __str__(self) -> str:
        text = f"{self.param}: {self.says}" if self.param else self.says
        return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def reported_faults(faults: Sequence[InputFault], body: Any) -> list[ReportedFault]:
    """The faults worth telling, of the classes that the request itself names."""
    return [
        ReportedFault(path_of(where), says)
        for where, says in dict(_of_value(list(faults), 0, body)).items()
    ]


def message(faults: Sequence[ReportedFault]) -> str:
    texts = [str(fault) for fault in faults[:MOST_FAULTS]]
    if len(faults) > MOST_FAULTS:
        texts.append(f"and {len(faults) - MOST_FAULTS} more")
    return "; ".join(texts)


def path_of(where: Sequence[Step]) -> str | None:
    """A field as clients write it; None: the whole request."""
    path = ""
    for step in where:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    if len(path) > _MOST_PATH:
        path = path[: _MOST_PATH - 1] + "…"
    return path or None


_Chosen = list[tuple[tuple[Step, ...], str]]
_Tried = tuple[int, list[InputFault]]
"""Faults of one class that was tried, and how many steps they agree in."""


def _of_value(faults: list[InputFault], depth: int, value: Any) -> _Chosen:
    """Those of one value, whose faults agree in ``depth`` steps."""
    if len(faults[0].where) == depth:
        return [((), faults[0].says)]
    tried = _tried(faults, depth, value)
    if not tried:
        by_step: dict[Step, list[InputFault]] = {}
        for fault in faults:
            by_step.setdefault(fault.where[depth], []).append(fault)
        return [
            ((step, *where), says)
            for step, inner in by_step.items()
            for where, says in _of_value(inner, depth + 1, _inner(value, step))
        ]
    fit = [one for one in tried if not _is_of_another_kind(*one)]
    if not fit:
        return [((), _alternatives([inner[0].says for _, inner in tried]))]
    at, best = min(fit, key=lambda one: _rank(one[0], one[1], value))
    return _of_value(best, at, value)


def _tried(faults: list[InputFault], depth: int, value: Any) -> list[_Tried]:
    """The classes that were tried on the value; none: the faults are in its fields."""
    classes: dict[Step, list[InputFault]] = {}
    of_fields = []
    for fault in faults:
        if _is_step(fault, depth, value):
            of_fields.append(fault)
        else:
            classes.setdefault(fault.where[depth], []).append(fault)
    if not classes:
        return []
    tried = [(depth + 1, each) for each in classes.values()]
    return [*tried, (depth, of_fields)] if of_fields else tried


def _is_step(fault: InputFault, depth: int, value: Any) -> bool:
    """Whether what follows is a field or a place, and no name of a class."""
    step = fault.where[depth]
    if isinstance(step, int):
        return True
    if is_class(step):
        return False
    if fault.kind == "missing" and depth + 1 == len(fault.where):
        return True
    return isinstance(value, dict) and step in value


def _inner(value: Any, step: Step) -> Any:
    try:
        return value[step]
    except (LookupError, TypeError):
        return None


def _is_of_another_kind(depth: int, faults: list[InputFault]) -> bool:
    """Whether the class is not of this value at all, as a text is no list."""
    return all(is_class(step) for fault in faults for step in fault.where[depth:])


def _rank(depth: int, faults: list[InputFault], value: Any) -> tuple[bool, int, int]:
    """The lower, the likelier this class was meant."""
    if tried := _tried(faults, depth, value):
        fit = [one for one in tried if not _is_of_another_kind(*one)]
        return min((_rank(*one, value) for one in fit), default=(True, 0, 0))
    names_one = isinstance(value, dict) and any(name in value for name in _DISCRIMINATORS)
    own = [(fault, _field(fault, depth, value)) for fault in faults]
    lacks = {field for fault, field in own if fault.kind == "missing" and fault.where[-1] == field}
    if any(field in _DISCRIMINATORS and fault.kind != "missing" for fault, field in own):
        return True, 0, 0
    # A value that names no class gets that fault.
    lacks_name = not lacks.isdisjoint(_DISCRIMINATORS)
    return lacks_name is names_one, len(lacks), len(faults)


def _field(fault: InputFault, depth: int, value: Any) -> Step | None:
    """The field of the value itself in which the fault is."""
    steps = range(depth, len(fault.where))
    return next((fault.where[at] for at in steps if _is_step(fault, at, value)), None)


def _alternatives(texts: list[str]) -> str:
    first, *others = dict.fromkeys(texts)
    return " or ".join([first, *(text.removeprefix(_SHOULD_BE) for text in others)])

"""Aliases: names that stand for one model, or for several by weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from loomserve.platform.config.base import FieldError, Section, check_model_name

_MOST_WEIGHT = 1_000_000
_LONG_FORM = ("models", "sticky")


class Alias(Section):
    """What an alias stands for.

    Short forms are read too: ``chat: a`` for one model, ``chat: {a: 95, b: 5}`` for weights alone.
    """

    models: dict[str, int] = Field(
        description="Each model with its weight, a whole number: it gets its share of their sum; "
        "one of weight 0 gets nothing."
    )
    sticky: Literal["key", "user"] | None = Field(
        None,
        description="key: requests of one API key go to one model; user: those of one end user "
        "(safety_identifier or user in the request), else of one key; null: each by itself.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_short_forms(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"models": {given: 1}}
        if isinstance(given, dict) and not _is_long(given):
            check_weights(given)
            return {"models": given}
        return given

    @field_validator("models", mode="before")
    @classmethod
    def _weights_are_right(cls, models: Any) -> Any:
        if isinstance(models, dict):
            check_weights(models)
        return models


def _is_long(given: Mapping[Any, Any]) -> bool:
    # A model may be named like a field: what has a number there is a weight.
    return any(name in given and not _is_number(given[name]) for name in _LONG_FORM)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_weights(models: Mapping[Any, Any]) -> None:
    """Raises FieldError if a weight is none, or all are 0."""
    for name, weight in models.items():
        if not isinstance(weight, int) or isinstance(weight, bool):
            raise FieldError("a weight must be a whole number, such as 95", name)
        if not 0 <= weight <= _MOST_WEIGHT:
            raise FieldError(f"a weight must be from 0 to {_MOST_WEIGHT}", name)
    if not any(models.values()):
        raise FieldError("no model has a weight above 0, so nobody could answer")


def check_alias(
    name: str,
    alias: Alias,
    *,
    models: Collection[str],
    batch_only: Collection[str],
    aliases: Collection[str],
) -> None:
    """Raises FieldError if the name is wrong or another's, or it stands for something that is no
    model."""
    try:
        check_model_name(name)
    except ValueError as error:
        raise FieldError(str(error)) from None
    if name in models or name in batch_only:
        raise FieldError(f"a model is named {name!r} already; give the alias another name")
    for model in alias.models:
        if model in models:
            continue
        if model in aliases:
            problem = f"{model!r} is an alias; name its models themselves"
        elif model in batch_only:
            problem = f"{model!r} is an offline model, which answers batches only"
        else:
            there = ", ".join(sorted(models)) or "none"
            problem = f"there is no model {model!r}; models: {there}"
        raise FieldError(problem, ("models", model))

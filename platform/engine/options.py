"""Checks engine options against the installed vLLM before anything is started."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from loomserve.platform.base.errors import ConfigError


def check(model: str, options: Iterable[str]) -> None:
    """Refuse names that vLLM does not know.

    Raises:
        ConfigError: names the option, and the nearest one that exists.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    known |= {field.name for field in dataclasses.fields(FrontendArgs)}
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"model {model!r}: engine option {option!r} is unknown to vLLM{hint}")


def of_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that an engine takes, without those of its front end alone."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    return {name: value for name, value in options.items() if name in known}


def structured(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of an engine, with vLLM's classes where mappings stand for them.

    Raises:
        ValueError: vLLM refuses what such a mapping says.
    """
    parsed = dict(options)
    for field in dataclasses.fields(AsyncEngineArgs):
        value = options.get(field.name)
        kind = _config_class(field.type) if isinstance(value, dict) else None
        if kind is not None:
            try:
                parsed[field.name] = TypeAdapter(kind).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{field.name}: {error}") from error
    return parsed


def _config_class(annotation: Any) -> type | None:
    """The dataclass that a field's type is, or is optionally."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    if get_origin(annotation) is Annotated:
        return _config_class(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        found = (_config_class(each) for each in get_args(annotation))
        return next((each for each in found if each is not None), None)
    return None

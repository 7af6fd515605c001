"""Engine options as vLLM's classes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs


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

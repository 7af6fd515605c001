"""``loomserve config describe``: every field of the configuration, from the fields themselves."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AwareDatetime, BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from loomserve.platform.config import Config, parse_bytes
from loomserve.platform.config.base import AUTO
from loomserve.platform.config.policies import PolicyRegistry

_WORDS: dict[object, str] = {
    bool: "true or false",
    float: "number",
    int: "whole number",
    str: "text",
    AwareDatetime: "date and time with its zone",
    types.NoneType: "null",
}
# By what stands for each of several sections in the names of their fields.
_KINDS = {"": "mapping", "[]": "list", ".NAME": "mapping of mappings"}
_WIDTH = 100


def describe() -> str:
    """Describe every field: its type, its default and its meaning."""
    return "\n".join(_section(Config, ""))


def _section(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        inner, each = _inner_section(field)
        kind = _KINDS[each] if inner else _type(field.annotation, field.metadata)
        if inner is None and (inner := _section_among(field.annotation)) is not None:
            each = ""
        kind += " | auto" if _may_be_auto(field) else ""
        yield f"{path}: {kind}, {_default(field)}"
        yield textwrap.fill(
            field.description or "", _WIDTH, initial_indent="    ", subsequent_indent="    "
        )
        if inner:
            yield from _section(inner, f"{path}{each}.")


def _inner_section(field: FieldInfo) -> tuple[type[BaseModel] | None, str]:
    """The section that a field holds, if any, and what stands for each of several."""
    origin, arguments = get_origin(field.annotation), get_args(field.annotation)
    each = "[]" if origin is tuple else ".NAME" if origin is dict else ""
    if origin is dict:
        inner = arguments[1]
    else:
        inner = arguments[0] if each or types.NoneType in arguments else field.annotation
    return (inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None), each


def _section_among(annotation: Any) -> type[BaseModel] | None:
    """The section that a field may hold in the place of a plain value."""
    if get_origin(annotation) is Annotated:
        return _section_among(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        found = (_section_among(one) for one in get_args(annotation))
        return next((one for one in found if one is not None), None)
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if _is_size(metadata):
        return "size such as 512MiB"
    if named := [one for one in metadata if isinstance(one, PolicyRegistry)]:
        return " | ".join(named[0].names)
    if origin is Annotated:
        flat = FieldInfo.from_annotation(annotation)
        return _type(flat.annotation, flat.metadata)
    if origin is tuple:
        return f"list of {_type(arguments[0], [])}"
    if origin is dict:
        return "mapping"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in {Union, types.UnionType}:
        return " | ".join(_type(one, []) for one in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _KINDS[""]
    return _WORDS[annotation] + "".join(f" {bound}" for bound in _bounds(metadata))


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for one in metadata:
        if isinstance(one, annotated_types.Ge):
            yield f">= {one.ge}"
        elif isinstance(one, annotated_types.Gt):
            yield f"> {one.gt}"
        elif isinstance(one, annotated_types.Le):
            yield f"<= {one.le}"
        elif isinstance(one, annotated_types.Lt):
            yield f"< {one.lt}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return "optional"
    if _may_be_auto(field):
        return "default auto"
    if isinstance(default, tuple | dict):
        return "default empty"
    if _is_size(field.metadata):
        return f"default {default // 2**20}MiB"
    if default is None or isinstance(default, bool):
        return f"default {str(default).lower().replace('none', 'null')}"
    return f"default {default}"


def _may_be_auto(field: FieldInfo) -> bool:
    return AUTO in field.metadata


def _is_size(metadata: list[Any]) -> bool:
    return any(isinstance(one, BeforeValidator) and one.func is parse_bytes for one in metadata)

"""Reads a configuration; errors name the field and the line of the file.

ruamel.yaml refuses repeated keys itself, but accepts dates, sets, keys that are no text and nodes
that contain themselves, and reads a field named ``y`` as true: it would save little of this.

A file may say ``auto`` where the platform chooses, and give models by their names. These short
forms are written in full before pydantic, whose strict mode takes lists for tuples in JSON only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from yaml.constructor import ConstructorError
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config.base import AUTO, FieldError, Section
from loomserve.platform.config.keys import ApiKey, KeysFile
from loomserve.platform.config.root import Config

S = TypeVar("S", bound=Section)


def load(path: Path) -> Config:
    """Read and check a configuration file. Raises ConfigError if the file cannot be read, is not
    YAML, or a field is wrong; one line an error, each ``file:line: field: what is wrong``."""
    return parse(_read(path), str(path))


def parse(text: str, source: str = "config") -> Config:
    """Check a configuration's text; see :func:`load`."""
    return _parse(Config, text, source, "a mapping with models, devices and server")


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read and check a file of API keys, ``server.api_keys_file``; errors as of :func:`load`."""
    return _parse(KeysFile, _read(path), str(path), "a mapping with api_keys").api_keys


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None


def _parse(section: type[S], text: str, source: str, what: str) -> S:
    root, data = _read_yaml(text, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source}:1: must be {what}")
    if section is Config:
        data = _in_full(data, root, source)
    try:
        # As JSON, because pydantic's strict mode takes lists for tuples only from there.
        return section.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, root, source))) from None


def _in_full(data: dict[str, Any], root: yaml.Node | None, source: str) -> dict[str, Any]:
    try:
        return in_full(data)
    except FieldError as error:
        field, line = _locate(error.field, root)
        raise ConfigError(f"{source}:{line}: {field}: {error}") from None


class _Loader(yaml.SafeLoader):
    """Loader of the YAML that JSON can express: no dates, sets or binary data."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        try:
            if kind not in {"bool", "float", "int", "map", "null", "seq", "str"}:
                raise ValueError
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # half a pair of surrogates is no character
        except ValueError:
            what = repr(node.value[:40]) if isinstance(node, yaml.ScalarNode) else "this"
            raise ConstructorError(
                None,
                None,
                f"{what} is no valid value ({kind}); put text in quotes",
                node.start_mark,
            ) from None
        return value


def _read_yaml(text: str, source: str) -> tuple[yaml.Node | None, Any]:
    try:
        root = yaml.compose(text, Loader=_Loader)
        _refuse_repeated_keys(root, source)
        return root, yaml.load(text, Loader=_Loader)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join(filter(None, (error.context, error.problem)))
        hint = "; indent with spaces" if r"'\t'" in problem else ""
        raise ConfigError(f"{where}: not valid YAML: {problem}{hint}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{source}:{line}: not valid YAML: character U+{error.character:04X} is not allowed"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}:1: not valid YAML: nested too deeply") from None


def _refuse_repeated_keys(node: yaml.Node | None, source: str) -> None:
    # YAML keeps the last of two equal keys, so half of what the user wrote would vanish.
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{source}:{line}: the name of a field must be text")
            if key.value in seen:
                raise ConfigError(f"{source}:{line}: {key.value!r} is given twice")
            seen.add(key.value)
            _refuse_repeated_keys(value, source)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, source)


# For the types of pydantic's errors whose messages speak of JSON or Python.
_MESSAGES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "extra_forbidden": "unknown field",
    "missing": "must be given",
    "model_type": "must be a mapping",
    "string_type": "must be text; put it in quotes",
    "timezone_aware": "must end with its zone, such as Z or +02:00",
    "tuple_type": "must be a list",
}


_UNION_TAGS = frozenset({"int", "count", "scaling"})


def _explain(error: ValidationError, root: yaml.Node | None, source: str) -> list[str]:
    problems: dict[str, list[str]] = {}
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        within = cause.field if isinstance(cause, FieldError) else ()
        field, line = _locate((*problem["loc"], *within), root)
        message = _MESSAGES.get(problem["type"], problem["msg"].removeprefix("Value error, "))
        # A field that may be of two types has a problem for each.
        place = f"{source}:{line}: {field}" if field else f"{source}:{line}"
        problems.setdefault(place, []).append(message)
    return [f"{place}: {', or '.join(messages)}" for place, messages in problems.items()]


def _locate(loc: tuple[int | str, ...], root: yaml.Node | None) -> tuple[str, int]:
    """Dotted name of a field, and the line of the nearest thing that the user wrote."""
    field, node = "", root
    line = root.start_mark.line + 1 if root else 1
    for part in loc:
        child = _child(node, part)
        if child is not None:
            line = child[0].start_mark.line + 1
        elif _is_union_tag(part):
            continue
        if isinstance(part, int) and isinstance(node, yaml.MappingNode) and child is not None:
            part = str(child[0].value)  # models by their names
        node = child[1] if child else None
        if isinstance(part, int):
            field += f"[{part}]"
        else:
            field += f".{part}" if field else part
    return field, line


def _is_union_tag(part: int | str) -> bool:
    # Pydantic adds the tried branch of a union ("int", "literal['auto']") to an error's place.
    return isinstance(part, str) and (part in _UNION_TAGS or part.startswith("literal["))


def _child(node: yaml.Node | None, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        if isinstance(part, int):
            return node.value[part] if part < len(node.value) else None
        return next(((k, v) for k, v in node.value if k.value == str(part)), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None


def in_full(given: dict[str, Any]) -> dict[str, Any]:
    """A configuration as its sections have it; what is wrong in other ways stays as it is. Raises
    FieldError if a short form is wrong."""
    full = _placed(given, "devices")
    models = full.get("models")
    if isinstance(models, dict):
        models = [_named(name, fields) for name, fields in models.items()]
    if isinstance(models, list):
        full["models"] = [
            _model(each, index) if isinstance(each, dict) else each
            for index, each in enumerate(models)
        ]
    return full


def _model(given: dict[str, Any], index: int) -> dict[str, Any]:
    model = _placed(given, "models", index, "devices")
    if model.get("lending") == AUTO:
        model["lending"] = {"auto": True}
    return model


def _placed(given: dict[str, Any], *field: str | int) -> dict[str, Any]:
    """Without ``devices`` that the platform chooses."""
    devices = given.get("devices")
    if devices == []:
        raise FieldError("is empty: name one at least, or write auto", field)
    return {name: value for name, value in given.items() if name != "devices" or value != AUTO}


def _named(name: str, fields: Any) -> dict[str, Any]:
    """A model of a mapping of names."""
    if isinstance(fields, str):
        return {"name": name, "source": fields}
    if not isinstance(fields, dict):
        raise FieldError("write its source, such as demo, or a mapping", ("models", name))
    if "name" in fields:
        raise FieldError(
            f"{name!r} stands before it already: leave it out", ("models", name, "name")
        )
    return {"name": name, **fields}

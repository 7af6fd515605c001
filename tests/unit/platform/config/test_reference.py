from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from loomserve.platform.config import Config, parse_bytes
from loomserve.platform.config.reference import describe

described = cache(describe)


@cache
def words() -> str:
    return re.sub(r"\s+", " ", described())


def nodes(node: type[BaseModel] = Config) -> Iterator[type[BaseModel]]:
    yield node
    for field in node.model_fields.values():
        for inner in sections(field):
            yield from nodes(inner)


def sections(field: FieldInfo) -> Iterator[type[BaseModel]]:
    within = get_args(field.annotation)
    # A part of a union may have a tag.
    tagged = (deep for each in within for deep in get_args(each))
    for inner in (field.annotation, *within, *tagged):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield inner


FIELDS = [(node, name) for node in nodes() for name in node.model_fields]


@pytest.mark.parametrize(("node", "name"), FIELDS)
def test_every_field_is_described(node: type[BaseModel], name: str) -> None:
    description = node.model_fields[name].description
    assert description
    assert description[0].strip()
    assert description in words()


def test_every_field_has_one_entry() -> None:
    entries = re.findall(r"^(\S+): ", described(), re.MULTILINE)
    assert len(entries) == len(set(entries)) == len(FIELDS)
    assert {entry.rpartition(".")[2] for entry in entries} == {name for _, name in FIELDS}


@pytest.mark.parametrize(
    "entry",
    [
        "devices: list | auto, default auto",
        "devices[].kind: cpu | cuda, default cpu",
        "devices[].cores: list of whole number >= 0, default empty",
        "devices[].gpu: whole number >= 0 | null, default null",
        "models[].name: text, required",
        "models[].devices: list of text | auto, default auto",
        "models[].replicas: whole number | auto | mapping, default auto",
        "models[].kv_cache_memory: size such as 512MiB, default 512MiB",
        "models[].engine: mapping, default empty",
        "models[].router: mapping, optional",
        "models[].router.load_limit: number > 0 <= 2, default 1.6",
        "models[].kvstore_quota: size such as 512MiB | null, default null",
        "models[].lending: mapping, default null",
        "models[].lending.lend_memory: size such as 512MiB | null, default null",
        "models[].lending.lenders: list of text, default empty",
        "models[].lending.tpot_budget: number > 1, default 1.15",
        "aliases: mapping of mappings, default empty",
        "aliases.NAME.models: mapping, required",
        "aliases.NAME.sticky: key | user | null, default null",
        "kvstore: mapping, default null",
        "kvstore.memory: size such as 512MiB, default 1024MiB",
        "kvstore.ssd_path: text | null, default null",
        "server.port: whole number >= 1 <= 65535, default 8000",
        "server.allow_unauthenticated: true or false, default false",
        "server.api_keys[].hash: text, required",
    ],
)
def test_an_entry_tells_type_and_default(entry: str) -> None:
    assert entry in described().splitlines()


def test_the_defaults_of_sizes_are_exact() -> None:
    shown = re.findall(r"^(\S+): size such as \S+, default (\d\S+)", described(), re.MULTILINE)
    assert len(shown) > 5
    for path, size in shown:
        assert parse_bytes(size) == field_at(path).default


def field_at(path: str) -> FieldInfo:
    section: type[BaseModel] = Config
    *outer, name = re.sub(r"\[\]|\.NAME", "", path).split(".")
    for each in outer:
        section = next(sections(section.model_fields[each]))
    return section.model_fields[name]

"""What a file may leave out, or say more shortly."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import parse


def test_names_and_sources_are_a_whole_configuration() -> None:
    config = parse("models: {chat: demo, org/code: 'demo:gemma3-270m'}")
    assert [(each.name, each.source) for each in config.models] == [
        ("chat", "demo"), ("org/code", "demo:gemma3-270m"),
    ]  # fmt: skip
    assert (config.devices, [each.devices for each in config.models]) == ((), [(), ()])


def test_auto_is_what_is_left_out() -> None:
    short = "models: [{name: chat, source: demo, pinned: true}]"
    full = "devices: auto\nmodels: {chat: {source: demo, devices: auto, pinned: true}}"
    assert parse(short) == parse(full)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {a: 3}", ":1: models.a: write its source"),
        ("models: {a: {source: demo, name: b}}", ":1: models.a.name: 'a' stands before it"),
        ("models:\n  a: demo\n  b: {source: demo, replicas: 0}", ":3: models.b.replicas: .*1 or m"),
        ("models:\n  a: demo\n  b: {source: demo, x: 1}", ":3: models.b.x: unknown field"),
        ("models: {a b: demo}", ":1: models.a b.name: "),
        ("devices: []\nmodels: {}", ":1: devices: is empty: name one at least, or write auto"),
        ("devices: some\nmodels: {}", ":1: devices: must be a list"),
        ("models: [{name: a, source: demo, devices: []}]", r"models\[0\].devices: is empty"),
        ("models: {a: {source: demo, devices: [core0]}}", "models.a.devices: .*devices is auto"),
        ("models: {a: {source: demo, pipeline: {}}}", "models.a.pipeline: .*name them"),
        ("models: {no: demo}", "must be text; put it in quotes"),
        ("models: demo", ":1: models: must be a list"),
        ("models: {a: demo, a: demo}", "'a' is given twice"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)

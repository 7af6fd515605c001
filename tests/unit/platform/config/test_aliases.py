"""Aliases in the configuration: short and long forms, and errors that name the field."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Alias, Config, parse

CONFIG = """\
devices: [{name: core0, cores: [0]}]
models:
  - {name: a, source: demo, devices: [core0]}
  - {name: org/b, source: demo, devices: [core0]}
batch:
  offline_models: [{name: old, source: demo, device: core0}]
aliases:
  other: a
  %s
"""


@pytest.mark.parametrize(
    ("written", "models", "sticky"),
    [
        ("chat: a", {"a": 1}, None),
        ("org/chat: {a: 95, org/b: 5}", {"a": 95, "org/b": 5}, None),
        ("chat: {a: 1, org/b: 0}", {"a": 1, "org/b": 0}, None),
        ("chat: {models: {a: 1}}", {"a": 1}, None),
        ("chat: {models: {a: 1}, sticky: null}", {"a": 1}, None),
        ("chat: {models: {a: 1}, sticky: key}", {"a": 1}, "key"),
        ("chat: {models: {a: 1}, sticky: user}", {"a": 1}, "user"),
    ],
)
def test_each_form_is_read(written: str, models: dict[str, int], sticky: str | None) -> None:
    config = parse(CONFIG % written)
    name = written.partition(":")[0]
    assert config.aliases[name] == Alias(models=models, sticky=sticky)
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_a_model_may_be_named_like_a_field() -> None:
    text = (CONFIG % "chat: {models: 95, sticky: 5}").replace("name: a,", "name: models,")
    config = parse(text.replace("org/b", "sticky").replace("other: a", "other: models"))
    assert config.aliases["chat"].models == {"models": 95, "sticky": 5}


@pytest.mark.parametrize(
    ("written", "field", "says"),
    [
        ("chat: x", "aliases.chat.models.x", "there is no model 'x'; models: a, org/b"),
        ("chat: {a: 1, x: 0}", "aliases.chat.models.x", "there is no model 'x'"),
        ("chat: {a: 0, org/b: 0}", "aliases.chat", "no model has a weight above 0"),
        ("chat: {models: {a: 0}}", "aliases.chat.models", "no model has a weight above 0"),
        ("chat: {}", "aliases.chat", "no model has a weight above 0"),
        ("chat: {a: -1}", "aliases.chat.a", "from 0 to 1000000"),
        ("chat: {a: 1000001}", "aliases.chat.a", "from 0 to 1000000"),
        ("chat: {a: 0.5}", "aliases.chat.a", "a whole number"),
        ("chat: {a: true}", "aliases.chat.a", "a whole number"),
        ("chat: {models: {a: much}}", "aliases.chat.models.a", "a whole number"),
        ("chat: {models: a}", "aliases.chat.models", "must be a mapping"),
        ("chat: {sticky: key}", "aliases.chat.models", "must be given"),
        ("chat: {models: {a: 1}, sticky: me}", "aliases.chat.sticky", "'key' or 'user'"),
        ("chat: {models: {a: 1}, colour: red}", "aliases.chat.colour", "unknown field"),
        ("chat: [a]", "aliases.chat", "must be a mapping"),
        ("chat: null", "aliases.chat", "must be a mapping"),
        ("chat: {a: 1, other: 1}", "aliases.chat.models.other", "'other' is an alias"),
        ("chat: chat", "aliases.chat.models.chat", "'chat' is an alias"),
        ("chat: old", "aliases.chat.models.old", "answers batches only"),
        ("a: org/b", "aliases.a", "a model is named 'a' already"),
        ("old: a", "aliases.old", "a model is named 'old' already"),
        ("my chat: a", "aliases.my chat", "'my chat' is no name"),
        ("/chat: a", "aliases./chat", "'/chat' is no name"),
    ],
)
def test_an_error_names_the_field_and_the_line(written: str, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parse(CONFIG % written)
    assert str(wrong.value).startswith(f"config:9: {field}: ")
    assert says in str(wrong.value)
    assert "\n" not in str(wrong.value)

"""Names of models, aliases and adapters: one rule, one message."""

import json
from typing import Any

import pytest

from loomserve.platform import config as configuration
from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Config
from loomserve.platform.fleet.messages import devices_with_replicas, replica_app


def named(model: str = "a", alias: str = "b", adapter: str = "c", **more: Any) -> Config:
    fields = {"source": "demo", "adapters": {"load": [{"name": adapter, "source": "x/y"}]}}
    given = {"models": {model: fields}, "aliases": {alias: model}, **more}
    return configuration.parse(json.dumps(given))


@pytest.mark.parametrize("name", ["qwen2.5:7b", "org/model:latest", "a:b:c", "A-1_b.c/d"])
def test_a_name_may_have_a_tag(name: str) -> None:
    assert named(model=name).models[0].name == name
    assert name in named(alias=name).aliases
    assert named(adapter=name).models[0].adapter_names == (name,)
    key = {"name": "k", "hash": "sha256:" + "0" * 64, "models": [name]}
    assert named(model=name, server={"api_keys": [key]}).server.api_keys[0].models == (name,)


@pytest.mark.parametrize("name", ["", ":a", "a b", "ä", "a" * 128, "a\n", "../a"])
@pytest.mark.parametrize("what", ["model", "alias", "adapter"])
def test_one_that_is_none_is_refused_in_the_same_words(what: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"is no name: use up to 127 letters, digits and \._-/:"):
        named(**{what: name})


def test_names_that_would_be_one_for_files_are_refused() -> None:
    models = {"org/a": "demo", "org:a": "demo"}
    with pytest.raises(ConfigError, match="org"):
        configuration.parse(json.dumps({"models": models}))


def test_the_applications_of_one_with_a_tag_are_told_apart_from_others() -> None:
    apps = {replica_app("qwen2.5:7b", "core0"): 1, replica_app("qwen2.5", "core0"): 2}
    assert not any("2.5:7b" in app for app in apps)
    assert devices_with_replicas("qwen2.5:7b", apps) == {"core0": 1}

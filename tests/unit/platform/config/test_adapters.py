"""Adapters in the configuration, and what does not go with them."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Config, parse

FILE = """
devices:
  - {{name: core0, cores: [0]}}
  - {{name: core1, cores: [1]}}
models:
  - {{name: chat, source: demo, devices: [core0, core1]{chat}}}
  - {{name: code, source: demo, devices: [core0], lending: {{lend_memory: 1MiB}}}}
{rest}
"""
SQL = "{name: sql, source: loras/sql}"


def read(chat: str = "", rest: str = "") -> Config:
    return parse(FILE.format(chat=f", {chat}" if chat else "", rest=rest), "file")


def test_fields_are_named_as_in_vllm_and_have_defaults() -> None:
    assert read().models[0].adapters is None
    adapters = read("adapters: {}").models[0].adapters
    assert adapters is not None
    assert (adapters.max_loras, adapters.max_lora_rank, adapters.max_cpu_loras) == (4, 16, 16)
    given = f"adapters: {{max_loras: 2, max_lora_rank: 64, max_cpu_loras: 2, load: [{SQL}]}}"
    adapters = read(given).models[0].adapters
    assert adapters is not None
    assert (adapters.max_loras, adapters.max_lora_rank, adapters.max_cpu_loras) == (2, 64, 2)
    assert (adapters.load[0].name, adapters.load[0].source) == ("sql", "loras/sql")


def test_an_alias_may_stand_for_an_adapter() -> None:
    rest = "aliases: {canary: {chat: 95, sql: 5}}"
    config = read(f"adapters: {{load: [{SQL}]}}", rest)
    assert config.aliases["canary"].models == {"chat": 95, "sql": 5}


@pytest.mark.parametrize(
    ("chat", "field", "words"),
    [
        ("adapters: {max_lora_rank: 12}", "models[0].adapters.max_lora_rank", "12"),
        ("adapters: {max_loras: 8, max_cpu_loras: 4}", "adapters.max_cpu_loras", "make it no less"),
        (f"adapters: {{load: [{SQL}, {SQL}]}}", "adapters.load[1].name", "names must differ"),
        (
            "adapters: {load: [{name: code, source: x}]}",
            "models[0].adapters.load[0].name",
            "a model is named 'code' already",
        ),
        (
            f"adapters: {{max_loras: 1, max_cpu_loras: 1, load: [{SQL}, {{name: b, source: x}}]}}",
            "adapters.load",
            "max_cpu_loras is 1",
        ),
        ("adapters: {rank: 8}", "models[0].adapters.rank", "unknown"),
        (
            "adapters: {}, lending: {borrow_memory: 1MiB}",
            "models[0].adapters",
            "to which vLLM applies no adapter",
        ),
        (
            "adapters: {}, pipeline: {}, kvstore: false",
            "models[0].adapters",
            "have been tried on engines of one device only",
        ),
        ("engine: {enable_lora: true}", "engine.enable_lora", "is set through 'adapters'"),
        ("engine: {max_loras: 2}", "engine.max_loras", "is set through 'adapters.max_loras'"),
        ("engine: {lora_modules: [a=b]}", "engine.lora_modules", "'adapters.load'"),
        (
            "adapters: {}, engine: {enable_tower_connector_lora: true}",
            "engine.enable_tower_connector_lora",
            "not told apart",
        ),
    ],
)
def test_what_cannot_be_is_named_with_its_field(chat: str, field: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(chat)
    assert field in str(error.value)
    assert words in str(error.value)


def test_an_alias_and_an_adapter_have_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="a model is named 'sql' already"):
        read(f"adapters: {{load: [{SQL}]}}", "aliases: {sql: chat}")

"""Models that come and go, as they are configured."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Config, Idle, parse

FILE = """\
devices:
  - name: core0
    cores: [0]
    memory: 4GiB
models:
  - name: a
    source: demo
    devices: [core0]
    start: on_demand
    pinned: false
    idle:
      sleep_after_s: 60
      unload_after_s: 600
elastic:
  wait_timeout_s: 30
"""


def test_it_is_read_as_written() -> None:
    config = parse(FILE)
    (model,) = config.models
    assert model.start == "on_demand"
    assert model.idle_rules == Idle(sleep_after_s=60, unload_after_s=600)
    assert config.devices[0].memory == 4 * 2**30
    assert config.elastic.wait_timeout_s == 30
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_without_it_a_model_starts_at_once_and_stays() -> None:
    bare = "".join(line for line in FILE.splitlines(True)[:8] if "memory" not in line)
    (model,) = parse(bare).models
    assert (model.start, model.idle_rules, model.pinned) == ("auto", None, False)


def test_one_on_demand_goes_when_it_is_idle_unless_it_is_pinned() -> None:
    begun = FILE[: FILE.index("    pinned")]
    assert parse(begun).models[0].idle_rules == Idle()
    assert parse(begun + "    pinned: true\n").models[0].idle_rules is None


@pytest.mark.parametrize(
    ("old", "new", "field", "line", "says"),
    [
        ("start: on_demand", "start: later", "models[0].start", 9, "'now' or 'on_demand'"),
        ("pinned: false", "pinned: true", "models[0].idle", 11, "is pinned"),
        ("600", "60", "models[0].idle.unload_after_s", 13, "make it longer"),
        ("_s: 60\n", "_s: 0\n", "models[0].idle.sleep_after_s", 12, "greater than 0"),
        ("4GiB", "512MiB", "models[0].kv_cache_memory", 6, "all of device 'core0'"),
        ("_s: 30", "_s: -1", "elastic.wait_timeout_s", 15, "greater than 0"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(
    old: str, new: str, field: str, line: int, says: str
) -> None:
    assert old in FILE
    with pytest.raises(ConfigError) as error:
        parse(FILE.replace(old, new, 1))
    assert str(error.value).startswith(f"config:{line}: {field}: ")
    assert says in str(error.value)


def test_only_a_gpu_has_memory_of_a_host_beside_its_own() -> None:
    gpu = "devices: [{name: g, kind: cuda, gpu: 0, memory: 70GiB, host_memory: 200GiB}]"
    models = "models: [{name: a, source: demo, devices: [g]}]"
    assert parse(f"{gpu}\n{models}").devices[0].host_memory == 200 * 2**30
    with pytest.raises(ConfigError, match=r"devices\[0\]\.host_memory: .*set memory alone"):
        parse(f"{gpu.replace('kind: cuda, gpu: 0', 'cores: [0]')}\n{models}")

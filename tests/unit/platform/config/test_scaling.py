"""Replicas by load, as they are configured."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Config, Idle, Model, Scaling, parse
from loomserve.platform.config.reference import describe
from loomserve.platform.devices.memory import least_replicas, plan_replicas

FILE = """\
devices:
  - name: core0
    cores: [0]
  - name: core1
    cores: [1]
models:
  - name: a
    source: demo
    devices: [core0, core1]
    replicas: REPLICAS
"""


def configured(replicas: str, more: str = "") -> Model:
    (model,) = parse(FILE.replace("REPLICAS", replicas) + more).models
    return model


def test_bounds_stand_beside_a_number_and_auto() -> None:
    assert configured("2").scaling is None
    assert configured("auto").scaling is None
    model = configured("{min: 0, max: 2, target_ongoing_requests: 4, tpot_slo_ms: 50}")
    assert model.scaling == Scaling(min=0, max=2, target_ongoing_requests=4, tpot_slo_ms=50)
    config = parse(FILE.replace("REPLICAS", "{max: 2}"))
    assert Config.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("replicas", "more", "said"),
    [
        ("{min: 2, max: 1}", "", "models[0].replicas.min: is 2, and max is 1"),
        ("{min: 1, max: 3}", "", "models[0].replicas.max: model 'a' asks for up to 3 replicas"),
        ("{min: 0}", "", "models[0].replicas.max: must be given"),
        ("{max: 2, min_replicas: 1}", "", "models[0].replicas.min_replicas: unknown field"),
        ("{max: many}", "", "models[0].replicas.max: "),
        ("{max: 2, ttft_slo_ms: 0}", "", "models[0].replicas.ttft_slo_ms: "),
        ("many", "", "models[0].replicas: Input should be a valid integer, or Input should be"),
        ("{min: 0, max: 2}", "    pinned: true\n", "models[0].replicas.min: model 'a' is pinned"),
        ("{max: 1}", "    pipeline: {}\n", "models[0].replicas: model 'a' is one pipeline"),
        ("{min: 1, max: 2}", "    roles: {prefill: 1, decode: 1}\n", "models[0].roles: model 'a'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(replicas: str, more: str, said: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        configured(replicas, more)
    assert said in str(wrong.value)


def test_it_starts_with_the_fewest_and_with_one_if_none_is_allowed() -> None:
    for replicas, started in (("{min: 0, max: 2}", 1), ("{min: 2, max: 2}", 2), ("{max: 2}", 1)):
        model = configured(replicas)
        assert least_replicas(model) == started
        assert plan_replicas([model], {"a": 2**20}, 64 * 2**30) == {"a": started}


def test_zero_is_a_matter_of_idle_rules_alone() -> None:
    none = configured("{min: 0, max: 2, downscale_delay_s: 30}")
    assert none.idle_rules == Idle(sleep_after_s=None, unload_after_s=30)
    idle = "    idle: {sleep_after_s: 5, unload_after_s: 9}\n"
    own = configured("{min: 0, max: 2}", idle)
    assert own.idle_rules == Idle(sleep_after_s=5, unload_after_s=9)
    some = configured("{min: 1, max: 2}", idle)
    assert some.idle_rules == Idle(sleep_after_s=5, unload_after_s=None)
    assert configured("{max: 2}").idle_rules is None
    on_demand = configured("{max: 2}", "    start: on_demand\n")
    assert on_demand.idle_rules == Idle(unload_after_s=None)


def test_its_fields_are_described() -> None:
    said = describe()
    assert "models[].replicas: whole number | auto | mapping, default auto" in said
    for name in Scaling.model_fields:
        assert f"models[].replicas.{name}: " in said

"""Batching policies of offline models, as they are configured."""

from __future__ import annotations

import re

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Batching, Config, parse

FILE = """\
devices: [{name: core0, cores: [0]}]
models: [{name: m, source: demo, devices: [core0]}]
batch:
  offline_models: [{name: old, source: demo, device: core0, batching: RULES}]
"""


def configured(rules: str) -> Batching:
    config = parse(FILE.replace("RULES", rules))
    assert Config.model_validate(config.model_dump(mode="json")) == config
    (model,) = config.offline_models
    return model.batching


@pytest.mark.parametrize(
    ("rules", "order"),
    [
        ("{}", "hrrn"),
        ("{policy: s3, next: oldest}", "oldest"),
        ("{policy: wma, most_waste: 2000}", "hrrn"),
        ("{policy: slo_odbs, threshold: 500, slo_weight: 0.1}", "deadline"),
        ("{policy: slo_dbs, output_weight: 2, next: hrrn}", "hrrn"),
        ("{policy: odbs, slo_weight: 1, next: deadline}", "deadline"),
        ("{policy: fifo, size: 7}", "oldest"),
    ],
)
def test_an_order_suits_its_policy_if_none_is_said(rules: str, order: str) -> None:
    assert configured(rules).order == order


@pytest.mark.parametrize(
    ("rules", "field", "said"),
    [
        ("{policy: best}", "policy", "s3"),
        ("{policy: fifo}", "size", "however long"),
        ("{size: 7}", "size", "set policy to fifo"),
        ("{policy: slo_dbs, slo_weight: 1}", "slo_weight", "set policy to slo_odbs or odbs"),
        ("{policy: fifo, size: 7, most_waste: 1}", "most_waste", "set policy to wma"),
        ("{policy: wma, threshold: 1}", "threshold", "slo_odbs"),
        ("{next: deadline}", "next", "write hrrn or oldest"),
    ],
)
def test_what_a_policy_does_not_have_is_refused(rules: str, field: str, said: str) -> None:
    place = re.escape(f"batch.offline_models[0].batching.{field}: ")
    with pytest.raises(ConfigError, match=f"{place}.*{said}"):
        configured(rules)

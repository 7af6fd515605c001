"""Models without weights, as a configuration has them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from loomserve.platform.config import Config, Fault, Model, OfflineModel, Simulated


def model(**fields: Any) -> Model:
    return Model(**{"name": "m", "source": "simulated", "devices": ("d",), **fields})


def test_what_it_stands_for_counts_as_its_kv_memory() -> None:
    assert model().is_simulated
    assert model(kv_cache_memory="2GiB").kv_bytes == 0
    assert model(simulated=Simulated(memory="16GiB")).kv_bytes == 16 * 2**30
    real = model(source="demo", kv_cache_memory="2GiB")
    assert (real.is_simulated, real.kv_bytes) == (False, 2 * 2**30)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"source": "demo", "simulated": Simulated()}, "has weights to compute with"),
        ({"lending": {"auto": True}}, "no KV and attention to lend"),
        ({"pipeline": {"layers": (1, 1)}, "devices": ("d", "e"), "kvstore": False}, "no layers"),
    ],
)
def test_what_needs_weights_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        model(**fields)


def test_offline_models_compute_with_weights() -> None:
    with pytest.raises(ValidationError, match="nothing to compute with"):
        OfflineModel(name="o", source="simulated", device="d")


def test_a_device_bounds_what_it_stands_for() -> None:
    device = {"name": "d", "cores": (0,), "memory": "8GiB"}
    Config(devices=(device,), models=(model(kv_cache_memory="9GiB"),))
    with pytest.raises(ValidationError, match="would take all of device"):
        Config(devices=(device,), models=(model(simulated=Simulated(memory="8GiB")),))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"what": "die"}, "either after_s or after_requests"),
        ({"what": "die", "after_s": 1, "after_requests": 1}, "either after_s or after_requests"),
        ({"what": "die", "after_s": 1, "seconds": 3}, "of no use with die"),
        ({"what": "hang", "after_s": 1, "factor": 3}, "of no use with hang"),
        ({"what": "slow_down", "after_s": 1}, "needs a factor"),
    ],
)
def test_a_fault_says_when_it_comes_and_how_it_goes(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Fault(**fields)

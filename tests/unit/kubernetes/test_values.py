"""Which configurations run on Kubernetes, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config.loader import parse
from loomserve.platform.kubernetes.values import derived_values, times

GIB = 2**30
ALONE: dict[str, Any] = {
    "devices": [{"name": "core0", "cores": [0]}],
    "models": [{"name": "m", "source": "demo", "devices": ["core0"]}],
    "server": {"host": "0.0.0.0", "allow_unauthenticated": True},
}


def derived(changes: dict[str, Any], weights: dict[str, int] | None = None) -> dict[str, Any]:
    text = yaml.safe_dump(ALONE | changes)
    return derived_values(text, parse(text), {"m": GIB} if weights is None else weights)


def on_nodes(*names: str) -> dict[str, Any]:
    devices = [{"name": f"d{at}", "cores": [0], "node": name} for at, name in enumerate(names)]
    model = {"name": "m", "source": "demo", "devices": [each["name"] for each in devices]}
    return {
        "cluster": {"gateways": "each_node"},
        "devices": devices,
        "models": [model],
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": "auto", "models": {"m": "demo"}}, "devices: list them"),
        ({"server": {}}, "server.host"),
        (
            {"server": ALONE["server"] | {"tls": {"certificate": "c", "key": "k"}}},
            "server.tls",
        ),
        (on_nodes("one") | {"models": {"m": "demo"}}, r"models\[0\].devices"),
        (
            on_nodes("one")
            | {"batch": {"offline_models": [{"name": "o", "source": "demo", "device": "d0"}]}},
            "batch.offline_models",
        ),
        ({"server": {"host": "0.0.0.0", "api_keys_file": "keys.yaml"}}, "api_keys_file"),
        (on_nodes("one") | {"cluster": {}}, "cluster.gateways"),
        (on_nodes("head"), "'head'"),
        (on_nodes("One"), "'One'"),
        (on_nodes("a.b"), "'a.b'"),
        ({"kvstore": {"ssd": "1GiB"}}, "kvstore.ssd_path"),
        ({"kvstore": {"ssd": "1GiB", "ssd_path": "/tmp/kv"}}, "kvstore.ssd_path"),
    ],
)
def test_refuses_what_cannot_run_there(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        derived(changes)


def test_asks_for_the_size_of_weights_that_are_elsewhere() -> None:
    with pytest.raises(ConfigError, match="--weights m=SIZE"):
        derived({}, weights={})


def test_a_pod_has_room_for_all_that_its_devices_may_have() -> None:
    (few,) = derived({})["nodes"]
    (more,) = derived(
        {
            "devices": [{"name": "core0", "cores": [0]}, {"name": "core1", "cores": [1]}],
            "models": [{"name": "m", "source": "demo", "devices": ["core0", "core1"]}],
        }
    )["nodes"]
    # A replica more: twice its weights, its KV, its engine.
    assert more["memory"] - few["memory"] >= 3 * GIB
    assert more["cpus"] == few["cpus"] + 1


def test_a_model_on_a_core_takes_memory_of_the_pod_though_a_gpu_is_there_too() -> None:
    core, gpu = {"name": "core0", "cores": [0]}, {"name": "gpu0", "kind": "cuda", "gpu": 0}
    large = {"name": "m", "source": "demo", "devices": ["core0"], "kv_cache_memory": "20GiB"}
    (alone,) = derived({"models": [large]})["nodes"]
    (beside,) = derived({"devices": [core, gpu], "models": [large]})["nodes"]
    assert beside["memory"] == alone["memory"] >= 20 * GIB
    (on_gpu,) = derived({"devices": [core, gpu], "models": [large | {"devices": ["gpu0"]}]})[
        "nodes"
    ]
    assert on_gpu["memory"] < 20 * GIB, "its KV is memory of the GPU"
    (anywhere,) = derived({"devices": [core, gpu], "models": [large | {"devices": "auto"}]})[
        "nodes"
    ]
    assert anywhere["memory"] == alone["memory"], "it may come to the core"


def test_a_kv_store_is_shared_memory_of_the_pods_with_engines() -> None:
    without, with_store = (
        derived(on_nodes("one")),
        derived(on_nodes("one") | {"kvstore": {"memory": "8GiB"}}),
    )
    (less,), (more,) = without["nodes"], with_store["nodes"]
    assert more["sharedMemory"] - less["sharedMemory"] == 8 * GIB
    assert more["memory"] - less["memory"] == 8 * GIB
    assert without["head"] == with_store["head"]


def test_only_the_head_has_what_there_is_but_once() -> None:
    made = derived(on_nodes("one", "two"))
    assert "loomserve_state" in made["head"]["offers"]
    assert [list(node["offers"]) for node in made["nodes"]] == [
        ["loomserve_node:one", "loomserve_core:one:0"],
        ["loomserve_node:two", "loomserve_core:two:0"],
    ]


def test_times_agree() -> None:
    made = times(drain_s=59.5, request_s=600)
    assert made["rayDrain"] > 60
    assert made["grace"] > made["preStop"] + made["rayDrain"]
    assert made["clusterDeletionDelay"] > 600

"""Configurations that benchmarks write are such as the platform takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks import (
    batch_kill,
    continuation_platform,
    elastic_scaling,
    popularity,
    prefix_arms,
    rebalance,
    rebalance_replicas,
)
from benchmarks.engine import BLOCK_TOKENS, block_bytes
from loomserve.platform import config

PORT = 18_999


KINDS = ["lending", "unified", "unified_even", "separated", "separated_even"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_models_of_a_fleet_can_hold_a_request(kind: str, dtype: str) -> None:
    fleet = config.parse(yaml.safe_dump(popularity.config(kind, "demo", PORT, dtype)))
    assert {model.name: model.replicas for model in fleet.models} == dict.fromkeys(
        (popularity.NORTH, popularity.SOUTH), 1 if kind == "lending" else 2
    )
    assert all(
        model.kv_cache_memory >= block_bytes(dtype) * popularity.CONTEXT // BLOCK_TOKENS
        for model in fleet.models
    )


@pytest.mark.parametrize("kind", KINDS)
def test_arms_of_shifting_popularity_have_the_same_memory(kind: str) -> None:
    written = popularity.config(kind, "demo", PORT, "float32", store=True)
    fleet = config.parse(yaml.safe_dump(written))
    blocks = [
        model.kv_cache_memory // block_bytes("float32") - 1
        for model in fleet.models
        for _ in range(int(model.replicas))
    ]
    assert sum(blocks) == popularity.OWN_BLOCKS + popularity.LENDER_BLOCKS
    if kind.endswith("_even"):
        assert len(set(blocks)) == 1
    assert fleet.kvstore is not None
    assert fleet.kvstore.memory == 2**30


@pytest.mark.parametrize("kind", rebalance_replicas.KINDS.values())
def test_arms_that_differ_in_replicas_have_the_same_memory(kind: str) -> None:
    fleet = config.parse(yaml.safe_dump(popularity.config(kind, "demo", PORT, "float32")))
    for model in fleet.models:
        blocks = model.kv_cache_memory // block_bytes("float32") - 1
        assert blocks * len(model.devices) == popularity.AMPLE_BLOCKS
        assert model.devices[0] == popularity.DEVICES[model.name]
        assert model.lending is None


def test_every_arm_of_shifting_popularity_is_one_of_these() -> None:
    assert {*rebalance.ARMS} - {*rebalance.WATCHED} == {*KINDS} - {"lending"}


def memory_of_prefix_arm(name: str, folder: Path) -> int:
    """Bytes of both engines and of the store, as the built arm has them."""
    arm = prefix_arms.arm(name, "demo", 0, folder)
    path = folder / f"{name}.yaml"
    if path.exists():
        served = config.parse(path.read_text())
        store = served.kvstore.memory if served.kvstore else 0
        return store + sum(int(each.replicas) * each.kv_cache_memory for each in served.models)
    words = [word for server in arm.servers for word in server.command]
    given = [word for word in words if word.startswith("--kv-cache-memory-bytes=")]
    return sum(int(word.partition("=")[2]) for word in given)


@pytest.mark.parametrize("name", prefix_arms.KINDS)
def test_arms_of_shared_prefixes_have_the_same_memory(name: str, tmp_path: Path) -> None:
    assert memory_of_prefix_arm(name, tmp_path) == prefix_arms.MEMORY_BYTES


def test_arms_of_shared_prefixes_are_those_that_their_names_say(tmp_path: Path) -> None:
    built = {name: prefix_arms.arm(name, "demo", 0, tmp_path) for name in prefix_arms.KINDS}
    arms = {
        name: config.parse((tmp_path / f"{name}.yaml").read_text())
        for name in built
        if name != "stock"
    }
    stores = {name: arm.kvstore.ssd for name, arm in arms.items() if arm.kvstore}
    assert stores == {
        "store": None,
        "store_and_disk": 4 * 2**30,
        "store_round_robin": None,
        "store_prefix_router": None,
    }
    assert {name: arm.models[0].router.policy for name, arm in arms.items()} == {
        name: kind.policy for name, kind in prefix_arms.KINDS.items() if kind.policy
    }
    # Requests take turns at vLLM's servers.
    assert [len(prefix_arms.targets(arm)) for arm in built.values()] == [1] * len(arms) + [2]


def test_pairs_tell_the_store_and_the_router_apart() -> None:
    pairs = {
        tuple((kind.policy, kind.store) for kind in map(prefix_arms.KINDS.__getitem__, pair))
        for pair in prefix_arms.PAIRS
    }
    load, turn = "load_aware", "round_robin"
    assert {
        ((load, True), (load, False)),
        ((load, True), (turn, True)),
        ((load, False), (turn, False)),
    } <= pairs
    assert {"stock", "power_of_two"} <= {name for pair in prefix_arms.PAIRS for name in pair}


def test_the_batch_lane_that_is_killed_has_a_folder(tmp_path: Path) -> None:
    served = config.parse(batch_kill.configuration(tmp_path, PORT).read_text())
    assert served.batch is not None
    assert served.server.port == PORT


@pytest.mark.parametrize("batched_tokens", [None, 512])
def test_each_engine_that_is_disturbed_can_hold_all_that_run(batched_tokens: int | None) -> None:
    written = continuation_platform.configuration(PORT, 2048, 8 * 2048, batched_tokens)
    served = config.parse(yaml.safe_dump(written))
    assert served.models[0].replicas == 2
    assert served.models[0].kv_cache_memory == served.kvstore.memory >= 256 * 2**20


def test_both_arms_of_a_burst_may_have_as_many_replicas() -> None:
    arms = elastic_scaling.replicas_of(elastic_scaling.Burst())
    written = {name: elastic_scaling.config("demo", each) for name, each in arms.items()}
    models = {name: config.parse(yaml.safe_dump(each)).models[0] for name, each in written.items()}
    assert models["static"].replicas == 2
    assert models["scaled"].scaling is not None
    assert (models["scaled"].scaling.min, models["scaled"].scaling.max) == (1, 2)


def test_a_burst_follows_a_calm_and_is_the_same_for_a_seed() -> None:
    burst = elastic_scaling.Burst(calm_s=20, rate=10, seconds=30)
    due = burst.due("a")
    assert due == sorted(due) == burst.due("a") != burst.due("b")
    calm = [at for at in due if at < burst.calm_s]
    assert 0 < len(calm) < 25
    assert 200 < len(due) - len(calm) < 400
    assert due[-1] < 50

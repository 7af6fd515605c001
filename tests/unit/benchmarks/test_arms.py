"""Arms are such as the platform takes, and differ in what their names say, not in memory."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from benchmarks import (
    continuation,
    disaggregation,
    elastic,
    prefix,
    prefix_arms,
    rebalance,
    shifting,
)
from benchmarks.adaptive import (
    ARMS,
    BLOCKS,
    STOCK,
    USUAL_ARMS,
    blocks_of,
    memory_bytes,
    store_bytes,
)
from benchmarks.engine import BLOCK_BYTES, BLOCK_TOKENS, block_bytes
from benchmarks.overhead import DEFAULT_ARMS, make_arms, pair_options, pairs
from benchmarks.platforms import two_models
from benchmarks.servers import Arm, EngineFlags
from loomserve.platform import config
from loomserve.platform.config import Config

PORT = 18_999
EXAMPLE = Path(__file__).parents[3] / "examples/laptop.yaml"
FLAGS = EngineFlags(dtype="float32", kv_cache_memory_bytes=300 * 2**20)


def parsed(written: object) -> Config:
    return config.parse(yaml.safe_dump(written))


# Overhead

Engine = dict[str, object]


def engines(arm: Arm, logs: Path) -> list[Engine]:
    """Flags and KV memory of each engine of an arm that is built."""
    path = logs / f"{arm.name}.yaml"
    if path.exists():
        served = config.parse(path.read_text())
        return [
            {**model.engine, "kv_cache_memory_bytes": model.kv_cache_memory}
            for model in served.models
        ]
    return [flags(server.command) for server in arm.servers]


def flags(command: object) -> Engine:
    """Of vLLM's command line, under the names of a configuration."""
    assert isinstance(command, list)
    names = EngineFlags().arguments()
    known = {name.removeprefix("--").partition("=")[0] for name in [*names, "--dtype"]}
    found: Engine = {}
    for word in command:
        name, _, value = str(word).removeprefix("--").partition("=")
        if name in known:
            found[name.replace("-", "_")] = yaml.safe_load(value) if value else True
    return found


@pytest.mark.parametrize("kinds", [*pairs(DEFAULT_ARMS), ("loomserve", "lending")])
def test_a_pair_has_the_same_engines_with_the_same_memory(
    kinds: tuple[str, str], tmp_path: Path
) -> None:
    arms = make_arms(kinds, "/m", FLAGS, tmp_path)
    first, second = (engines(arm, tmp_path) for arm in arms)
    assert first == second
    assert len(first) == (1 if "one" in kinds else 2)
    for arm in arms:
        # Where all are asked at once, each engine is asked by an address or a name of its own.
        assert len({(to.url, to.model) for to in arm.targets}) == len(arm.targets) == len(first)
    memory = {each["kv_cache_memory_bytes"] for each in first}
    expected = pair_options(kinds, FLAGS).flags
    assert memory == {expected.kv_cache_memory_bytes}


def test_the_default_configuration_has_the_examples_options_and_store(tmp_path: Path) -> None:
    _, arm = make_arms(("bare", "default"), "/m", FLAGS, tmp_path)
    example = config.parse(EXAMPLE.read_text())
    served = config.parse((tmp_path / f"{arm.name}.yaml").read_text())
    assert served.kvstore == example.kvstore
    measured, of_example = served.models[0], example.models[0]
    assert measured.kv_cache_memory == of_example.kv_cache_memory
    assert of_example.engine.items() <= measured.engine.items()
    for part in ("scheduling", "router", "lending", "adapters"):
        assert getattr(measured, part) == getattr(of_example, part)


def test_only_the_default_configuration_has_a_store(tmp_path: Path) -> None:
    for kind in ("one", "loomserve", "lending"):
        _, arm = make_arms(("bare", kind), "/m", FLAGS, tmp_path)
        assert config.parse((tmp_path / f"{arm.name}.yaml").read_text()).kvstore is None


def test_both_arms_get_the_same_engine() -> None:
    flags = EngineFlags(dtype="float32")
    served = parsed(two_models("/models/m", flags, 8000))
    measured, idle = served.models
    told = dict(word.removeprefix("--").partition("=")[::2] for word in flags.arguments())
    assert int(told.pop("kv-cache-memory-bytes")) == measured.kv_cache_memory
    assert told.pop("enforce-eager") == ""
    assert measured.engine["enforce_eager"] is True
    given = {name.replace("_", "-"): str(value) for name, value in measured.engine.items()}
    assert told == {name: value for name, value in given.items() if name != "enforce-eager"}
    assert idle.engine == measured.engine
    assert served.device(measured.devices[0]).cores == (0,)
    assert served.device(idle.devices[0]).cores == (1,)


# Shifting popularity


def blocks_in_all(kind: str, dtype: str = "float32") -> list[int]:
    fleet = parsed(shifting.configured(kind, "demo", PORT, dtype, store=False))
    return [
        model.kv_cache_memory // block_bytes(dtype) - 1
        for model in fleet.models
        for _ in model.devices
    ]


@pytest.mark.parametrize("by", rebalance.ARMS)
def test_arms_of_shifting_popularity_have_the_same_memory(by: str) -> None:
    kinds = {arm.fleet for arm in rebalance.ARMS[by].values()}
    assert len({sum(blocks_in_all(kind)) for kind in kinds}) == 1
    assert all(len({*blocks_in_all(kind)}) == 1 for kind in kinds if kind.endswith("_even"))
    assert set(rebalance.STEADY) <= rebalance.ARMS[by].keys()


@pytest.mark.parametrize("kind", shifting.KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_models_of_a_fleet_can_hold_a_request_and_begin_at_home(kind: str, dtype: str) -> None:
    fleet = parsed(shifting.configured(kind, "demo", PORT, dtype, store=True))
    least = block_bytes(dtype) * shifting.CONTEXT // BLOCK_TOKENS
    for model in fleet.models:
        assert model.kv_cache_memory >= least
        assert model.devices[0] == shifting.DEVICES[model.name]
        assert (model.roles is not None) == shifting.KINDS[kind].roles
    assert fleet.kvstore is not None


# Prefixes, and prefill apart


def memory_of_prefix_arm(name: str, folder: Path) -> int:
    """Bytes of both engines and of the store, as the built arm has them."""
    arm, _ = prefix_arms.arm(name, "demo", 0, folder)
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


def test_a_pair_of_prefix_arms_is_compared_request_by_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Of three requests the store is slower with one, whatever the order of their times.
    first_tokens = {"store": [1.0, 2.0, 30.0], "prefix_router": [2.0, 40.0, 20.0]}

    def replay(of: str, *_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(ttft=each) for each in first_tokens[of]]

    same = {"ttft_ms_p50": 1.0, "ttft_ms_p99": 1.0, "hit_rate": 0.5}
    monkeypatch.setattr(prefix, "arm", lambda name, *_: (name, None))
    monkeypatch.setattr(prefix, "running", lambda *_, **__: nullcontext())
    monkeypatch.setattr(prefix, "workload", lambda *_: [])
    monkeypatch.setattr(prefix, "replay", replay)
    monkeypatch.setattr(prefix, "figures", lambda _: same)
    options = argparse.Namespace(runs=2, start_timeout=1.0)
    found = prefix.pairing("demo", ("store", "prefix_router"), options, tmp_path)
    assert found["by_request"]["ttft_ratio_n"] == 6
    assert found["by_request"]["ttft_ratio_p50"] == 0.5
    assert found["by_request"]["ttft_ratio_p99"] == 1.5


def test_arms_of_shared_prefixes_are_those_that_their_names_say(tmp_path: Path) -> None:
    built = {name: prefix_arms.arm(name, "demo", 0, tmp_path)[0] for name in prefix_arms.KINDS}
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
    assert [len(prefix_arms.urls(arm)) for arm in built.values()] == [1] * len(arms) + [2]


def test_pairs_tell_the_store_and_the_router_apart() -> None:
    pairs = {
        tuple((kind.policy, kind.store) for kind in map(prefix_arms.KINDS.__getitem__, pair))
        for pair in prefix.PAIRS
    }
    load, turn = "load_aware", "round_robin"
    assert {
        ((load, True), (load, False)),
        ((load, True), (turn, True)),
        ((load, False), (turn, False)),
    } <= pairs
    assert {"stock", "power_of_two"} <= {name for pair in prefix.PAIRS for name in pair}


def test_both_arms_of_prefill_and_decode_are_one_configuration_but_for_the_roles() -> None:
    separated, unified = (
        parsed(disaggregation.configured(name, "/models/m", 8000)) for name in disaggregation.ROLES
    )
    roles = separated.models[0].roles
    assert roles is not None
    assert (roles.prefill, roles.decode, unified.models[0].roles) == (1, 1, None)
    assert separated.models[0].model_copy(update={"roles": None}) == unified.models[0]
    assert separated.model_copy(update={"models": unified.models}) == unified


# Adaptive


@pytest.mark.parametrize("swap_tokens", [128, 1024, 4096])
def test_one_arm_of_stock_vllm_has_all_memory_of_the_others(swap_tokens: int) -> None:
    ours = {memory_bytes(arm, swap_tokens) for arm in ARMS.keys() - STOCK.keys()}
    assert len(ours) == 1
    lacking = ours.pop() - memory_bytes("recompute_all_memory", swap_tokens)
    # Less than a block of the store's least memory.
    assert 0 <= lacking < BLOCK_BYTES


def test_all_others_have_the_same_kv_memory() -> None:
    assert {blocks_of(arm, 1024) for arm in ARMS if arm != "recompute_all_memory"} == {BLOCKS}
    assert blocks_of("recompute_all_memory", 1024) == BLOCKS + store_bytes(1024) // BLOCK_BYTES


def test_the_parts_of_adaptive_are_reported_by_default() -> None:
    assert {*STOCK, "swap", "adaptive", "adaptive_fcfs", "without_predictions"} <= {*USUAL_ARMS}
    adaptive = ARMS["adaptive"]
    assert adaptive is not None
    for arm, changed in (
        ("adaptive_fcfs", {"queue": "fcfs"}),
        ("without_peak_admission", {"peak_admission": False}),
        ("without_predictions", {}),
    ):
        assert ARMS[arm] == {**adaptive, **changed}


# Others


@pytest.mark.parametrize("batched_tokens", [None, 512])
def test_each_engine_that_is_disturbed_can_hold_all_that_run(batched_tokens: int | None) -> None:
    written = continuation.configured(PORT, 2048, 8 * 2048, batched_tokens)
    served = config.parse(yaml.safe_dump(written))
    assert served.models[0].replicas == 2
    assert served.models[0].kv_cache_memory == served.kvstore.memory >= 256 * 2**20


def test_names_are_on_each_core_in_turn_and_loaded_as_they_are_told() -> None:
    names = {"now": "now", "later": "on_demand", "last": "on_demand"}
    served = parsed(elastic.configured("demo", names, memory=2**32))
    assert [model.devices for model in served.models] == [("core0",), ("core1",), ("core0",)]
    assert [model.start for model in served.models] == [*names.values()]

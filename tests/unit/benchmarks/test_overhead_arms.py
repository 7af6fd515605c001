"""Both arms of a pair have the same engines with the same memory."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from benchmarks.overhead import arguments, beyond_noise
from benchmarks.overhead_arms import (
    DEFAULT_ARMS,
    comparison_name,
    default_options,
    make_arms,
    pairs,
    parse_kinds,
)
from benchmarks.servers import Arm, EngineFlags
from loomserve.platform import config

EXAMPLE = Path(__file__).parents[3] / "examples/laptop.yaml"
FLAGS = EngineFlags(dtype="float32", kv_cache_memory_bytes=300 * 2**20)

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
    first, second = (engines(arm, tmp_path) for arm in make_arms(kinds, "/m", FLAGS, tmp_path))
    assert first == second
    assert len(first) == (1 if "one" in kinds else 2)
    memory = {each["kv_cache_memory_bytes"] for each in first}
    expected = default_options().flags if "default" in kinds else FLAGS
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


def test_the_baseline_goes_with_each_other_and_itself_first() -> None:
    options = arguments([])
    assert options.loads == ("first", "1", "8", "32", "64")
    names = [comparison_name(*kinds) for kinds in pairs(options.arms)]
    assert names == ["noise", "one", "loomserve", "default"]
    assert comparison_name("loomserve:/x", "loomserve") == "loomserve"
    assert comparison_name("bare", "loomserve:/x") == "loomserve-there"


@pytest.mark.parametrize("wrong", ["bare", "bare,other", "bare,loomserve:/nowhere"])
def test_arms_that_cannot_be_compared_are_refused(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_kinds(wrong)


def test_a_ratio_within_the_noise_is_told_from_one_beyond_it() -> None:
    noise = {"spread": {"throughput_ratio_8": [0.97, 1.04], "throughput_ratio_32": [0.99, 1.01]}}
    other = {"throughput_ratio_8": 1.03, "throughput_ratio_32": 0.95}
    assert beyond_noise({"noise": noise, "default": other}) == {
        "default": {"throughput_ratio_8": False, "throughput_ratio_32": True}
    }
    assert beyond_noise({"default": other}) == {}

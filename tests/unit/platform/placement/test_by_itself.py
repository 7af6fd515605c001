"""Configurations that leave something out, and what the platform makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import LOCAL_NODE, Config, Idle, Lending, parse
from loomserve.platform.devices.gpus import Gpu
from loomserve.platform.devices.machine import MachineParts, check_compiler, parts_here
from loomserve.platform.models import catalog
from loomserve.platform.placement import division_of_model
from loomserve.platform.placement.by_itself import Placed, leaves_something, placed, placed_late
from loomserve.platform.placement.own_devices import NodeParts
from loomserve.platform.placement.own_placement import placed_here, said
from loomserve.platform.placement.policy.graph import ModelShape

GIB = 2**30
WEIGHTS = GIB // 4
TWENTY = ", ".join(f"m{number}: org/name" for number in range(20))


def node(memory: float = 24, cores: int = 2, gpus: Mapping[int, int] | None = None) -> NodeParts:
    """``gpus``: bytes that are free of each; it has twice as many."""
    on_gpus = {number: Gpu(2 * free, free) for number, free in (gpus or {}).items()}
    parts = MachineParts((tuple(range(cores)),), on_gpus, int(memory * GIB))
    return NodeParts(parts, 2 * GIB)


def made(text: str, **nodes: NodeParts) -> Placed:
    config = parse(text)
    weights = {model.name: WEIGHTS for model in config.models}
    return placed(config, Path("/"), nodes or {LOCAL_NODE: node()}, weights)


def test_names_and_sources_are_enough() -> None:
    found = made(f"models: {{{TWENTY}}}")
    config = found.config
    assert [(each.name, each.cores) for each in config.devices] == [
        ("core0", (0,)), ("core1", (1,)),
    ]  # fmt: skip
    # A sixteenth stays free, and what the platform takes.
    assert {each.memory for each in config.devices} == {int((24 * 15 / 16 - 2) / 2 * GIB)}
    assert [model.start for model in config.models] == ["now"] * 2 + ["on_demand"] * 18
    assert all(model.idle == Idle() for model in config.models)
    assert all(model.engine == {"enforce_eager": True} for model in config.models)
    assert {model.devices for model in config.models} == {("core0", "core1"), ("core1", "core0")}
    assert list(said(found))[:3] == [
        "device core0: 10.2 GiB for models",
        "device core1: 10.2 GiB for models",
        "m0: core0 had the most room: 10.2 GiB, of which it takes 0.9 GiB",
    ]
    assert not leaves_something(config)
    # A plan is the same each time, and begins with itself.
    assert made(f"models: {{{TWENTY}}}") == found


def test_what_the_file_says_stays() -> None:
    config = made(
        """
devices:
  - {name: big, cores: [0], memory: 6GiB}
  - {name: small, cores: [1]}
models:
  - {name: given, source: demo, devices: [big], engine: {max_model_len: 512}}
  - {name: kept, source: demo, pinned: true, engine: {enforce_eager: false}}
  - {name: later, source: demo, start: on_demand, idle: {sleep_after_s: 5}}
  - {name: stays, source: demo, start: now, idle: null}
"""
    ).config
    given, kept, later, stays = config.models
    assert [each.memory for each in config.devices] == [6 * GIB, int((22.5 - 2 - 6) * GIB)]
    assert (given.devices, given.start, given.idle_rules) == (("big",), "auto", None)
    assert given.engine == {"max_model_len": 512}
    assert (kept.devices[0], kept.start, kept.idle_rules) == ("small", "now", None)
    assert kept.engine == {"enforce_eager": False}
    assert (later.start, later.idle) == ("on_demand", Idle(sleep_after_s=5))
    assert (stays.start, stays.idle) == ("now", None)


def test_a_file_that_says_all_is_not_touched() -> None:
    full = "devices: [{name: d, cores: [0]}]\nmodels: [{name: a, source: demo, devices: [d]}]"
    config = parse(full)
    assert placed_here(config, Path("/"), print) == Placed(config)
    assert config.devices[0].memory is None


def test_gpus_are_used_where_there_are_some() -> None:
    found = made("models: {a: demo}", **{LOCAL_NODE: node(gpus={0: 80 * GIB, 1: 80 * GIB})})
    config = found.counted
    assert [(each.name, each.gpu) for each in config.devices] == [("gpu0", 0), ("gpu1", 1)]
    assert {each.memory for each in config.devices} == {72 * GIB}
    # Equal parts of what a node without GPUs would have for its cores.
    assert {each.host_memory for each in config.devices} == {int((24 * 15 / 16 - 2) / 2 * GIB)}
    assert next(said(found)) == "device gpu0: 72.0 GiB for models, 10.2 GiB of its host"
    assert config.models[0].devices == ("gpu0", "gpu1")
    assert (config.models[0].replicas, found.config.models[0].replicas) == (2, "auto")
    assert config.models[0].engine == {}


def test_a_gpu_without_free_memory_takes_no_models() -> None:
    full = {LOCAL_NODE: node(gpus={0: 0})}
    with pytest.raises(StartError, match=r"'gpu0', GPU 0: its driver does not tell"):
        made("models: {a: demo}", **full)
    full[LOCAL_NODE].parts.gpus[0] = Gpu(80 * GIB, 2**19)
    with pytest.raises(StartError, match=r"GPU 0: 0\.0 of its 80\.0 GiB are free; end other"):
        made("models: {a: demo}", **full)
    given = "devices: [{name: g, kind: cuda, gpu: 1}]\nmodels: {a: demo}"
    with pytest.raises(StartError, match=r"device 'g' is GPU 1, which is not there"):
        made(given, **full)


def test_what_the_file_says_of_a_gpus_host_stays_and_cores_have_the_host_alone() -> None:
    gpus = {LOCAL_NODE: node(gpus={0: 80 * GIB, 1: 80 * GIB})}
    given = "{name: g, kind: cuda, gpu: 0, host_memory: 16GiB}, {name: h, kind: cuda, gpu: 1}"
    config = made(f"devices: [{given}]\nmodels: {{a: demo}}", **gpus).config
    assert [each.host_memory for each in config.devices] == [16 * GIB, int((22.5 - 2 - 16) * GIB)]
    with pytest.raises(StartError, match=r"for engines on GPUs on device 'h'.*devices.host_memory"):
        made(f"devices: [{given.replace('16', '20')}]\nmodels: {{a: demo}}", **gpus)
    beside = f"{given}, {{name: c, cores: [0]}}"
    devices = made(f"devices: [{beside}]\nmodels: {{a: demo}}", **gpus).config.devices
    assert [each.host_memory for each in devices] == [16 * GIB, None, None]


def test_a_cluster_s_devices_are_all_that_its_nodes_have() -> None:
    text = "cluster: {address: 'one:6379'}\nmodels: {a: demo, b: demo, c: demo}"
    found = made(text, one=node(12, 1), two=node(24, 2)).config
    assert [(each.name, each.node, each.cores) for each in found.devices] == [
        ("one-core0", "one", (0,)), ("two-core0", "two", (0,)), ("two-core1", "two", (1,)),
    ]  # fmt: skip
    assert [model.start for model in found.models] == ["now"] * 3
    assert {model.devices[0] for model in found.models} == {each.name for each in found.devices}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {a: {source: demo, kv_cache_memory: 40GiB}}",
         r"models\[0\].source: model 'a' cannot be placed: it needs 40.4 GiB, and no device"),
        ("models: {a: demo, b: {source: demo, replicas: 3}}", r"models\[1\].replicas: .*'b'"),
        ("models: {a: {source: demo, start: now, kv_cache_memory: 6GiB, replicas: 2},"
         " b: {source: demo, start: now, kv_cache_memory: 6GiB}}", r"models\[1\].start: .*'b'"),
    ],
)  # fmt: skip
def test_a_model_that_fits_nowhere_is_named_with_its_field(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "resolve", lambda *_, **__: "a hub id")
    with pytest.raises(StartError, match=message):
        made(text)


def test_a_machine_without_memory_is_refused() -> None:
    with pytest.raises(StartError, match="no memory is left for models on device 'core0'"):
        made("models: {a: demo}", **{LOCAL_NODE: node(2)})


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model of 30 layers with an output head as large as eight of them."""
    monkeypatch.setattr(catalog, "resolve", lambda *_, **__: tmp_path)
    shape = ModelShape(
        layers=30,
        hidden_size=576,
        layer_parameters=3.5e6,
        embedding_parameters=28_000_000,
        head_parameters=28_000_000,
    )
    monkeypatch.setattr(division_of_model.device_profile, "default_path", lambda: tmp_path / "none")
    monkeypatch.setattr("loomserve.platform.placement.model_files.read", lambda _: shape)


def test_a_model_that_no_device_holds_is_divided_among_several(large: None) -> None:
    text = "models: {small: demo, large: {source: demo, kv_cache_memory: 13GiB}}"
    found = made(text, **{LOCAL_NODE: node(24, 4)})
    small, model = found.config.models
    assert model.pipeline is not None
    assert sum(model.pipeline.layers) == 30
    # No device holds it (5.1 GiB each), and no three; the fewest that do.
    assert len(model.devices) == len(model.pipeline.layers) == 4
    assert (model.kvstore, model.start) == (False, "now")
    assert found.assignments["large"].why.startswith("no device holds its 13.4 GiB; layers: core")
    # It has taken what there was.
    assert small.start == "on_demand"


def test_one_that_needs_what_others_have_comes_when_it_is_asked_for(large: None) -> None:
    text = (
        "devices: [{name: a, cores: [0]}, {name: b, cores: [1]}]\n"
        "models:\n"
        "  - {name: given, source: demo, devices: [a], kv_cache_memory: 6GiB}\n"
        "  - {name: large, source: demo, kv_cache_memory: 12GiB}\n"
    )
    _, model = made(text).config.models
    assert (model.start, model.devices, model.pipeline is not None) == (
        "on_demand", ("a", "b"), True,
    )  # fmt: skip


def test_one_over_http_may_come_anywhere() -> None:
    config = made("models: {a: demo}").config
    (model,) = parse("models: {late: demo}").models
    late = placed_late(model, config.devices, Path("/"))
    assert (late.devices, late.start) == (("core0", "core1"), "on_demand")
    assert late.idle == Idle()
    assert placed_late(late, config.devices, Path("/")) == late
    Config.model_validate(config.model_copy(update={"models": (late,)}).model_dump())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder that is a model's as far as its configuration says."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_models_lend_to_each_other_without_saying_so(llama: Path) -> None:
    found = made(f"models: {{a: '{llama}', b: {{source: '{llama}'}}}}")
    assert [model.lending for model in found.config.models] == [Lending(auto=True)] * 2
    assert all(
        assignment.why.endswith("; lending: auto") for assignment in found.assignments.values()
    )
    assert made(f"models: {{a: '{llama}', b: {{source: '{llama}'}}}}") == found
    (late,) = parse(f"models: {{late: '{llama}'}}").models
    assert placed_late(late, found.config.devices, Path("/")).lending == Lending(auto=True)


@pytest.mark.parametrize(
    "model",
    [
        "{source: FOLDER, lending: null}",
        "{source: FOLDER, adapters: {load: [{name: x, source: x}]}}",
        "{source: FOLDER, engine: {tensor_parallel_size: 2}}",
        "{source: FOLDER, engine: {enforce_eager: false}}",
        "{source: FOLDER, scheduling: {chunked_recompute: false}}",
        "{source: ORG/NAME}",
    ],
)
def test_what_cannot_lend_or_is_not_to_does_not(llama: Path, model: str) -> None:
    found = made(f"models: {{a: {model.replace('FOLDER', str(llama))}}}")
    assert found.config.models[0].lending is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3_text"},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True},
        {},
    ],
)
def test_what_attends_in_another_way_does_not_lend(llama: Path, config: dict[str, object]) -> None:
    (llama / "config.json").write_text(json.dumps(config))
    assert made(f"models: {{a: '{llama}'}}").config.models[0].lending is None


def test_one_device_and_gpus_do_not_lend(llama: Path) -> None:
    for there in (node(cores=1), node(gpus={0: 80 * GIB, 1: 80 * GIB})):
        found = made(f"models: {{a: '{llama}'}}", **{LOCAL_NODE: there})
        assert found.config.models[0].lending is None


def test_without_a_compiler_nothing_lends_and_who_is_to_is_told(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    found = made(f"models: {{a: '{llama}'}}").config.models[0]
    assert found.lending is None
    check_compiler([found])
    lends = found.model_copy(update={"lending": Lending(auto=True)})
    with pytest.raises(StartError, match="install g"):
        check_compiler([lends])
    (tmp_path / "share/loomserve/native").mkdir(parents=True)
    check_compiler([lends])
    assert made(f"models: {{a: '{llama}'}}").config.models[0].lending == Lending(auto=True)


def test_this_machine_has_cores_and_memory() -> None:
    parts = parts_here()
    assert sum(map(len, parts.cores)) >= 1
    assert 2**28 < parts.memory < 2**50

"""From configurations and device profiles to maps, and how they are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.cli import main
from loomserve.platform.config import Device, parse
from loomserve.platform.devices.binding import pipeline_environment
from loomserve.platform.devices.memory import ENGINE_BYTES, STAGE_BYTES, replica_bytes
from loomserve.platform.placement import device_profile, model_files
from loomserve.platform.placement.configured import stages_of
from loomserve.platform.placement.policy import explanation
from loomserve.platform.placement.policy.device_times import (
    DeviceProfile,
    MeasuredDevice,
    MeasuredLink,
    ModelTimes,
    StageTimes,
    stage_times,
)
from loomserve.platform.placement.policy.graph import ModelShape
from loomserve.platform.placement.policy.placer import Wanted, place_models

GIB = 2**30
SHAPE = ModelShape(30, 576, 3.5e6, 28_000_000, 28_000_000)


def measured_device(name: str, speed: float, memory: int = 8 * GIB) -> MeasuredDevice:
    times = StageTimes(
        batch=8,
        layer_s=0.001 / speed,
        stage_s=0.001 / speed,
        first_s=0.0001 / speed,
        last_s=0.008 / speed,
    )
    return MeasuredDevice(
        name=name,
        place=name,
        memory=memory,
        bytes_per_s=10e9 * speed,
        flop_per_s=50e9 * speed,
        itemsize=4,
        models=(ModelTimes(model="demo", times=(times,)),),
    )


def profile(*devices: MeasuredDevice) -> DeviceProfile:
    return DeviceProfile(
        measured_at="2026-01-01T00:00:00+00:00",
        devices=devices,
        links=tuple(
            MeasuredLink(
                source=a.name, target=b.name, latency_s=1e-4, bytes_per_s=5e9, measured=True
            )
            for a in devices
            for b in devices
            if a is not b
        ),
    )


def wanted(name: str = "m", load: float = 0.0, **changed: object) -> Wanted:
    given = {
        "source": "demo",
        "shape": SHAPE,
        "devices": ("quick", "slow"),
        "kv_bytes": 0.25 * GIB,
        "mode": "balanced",
        "batch": 8,
    }
    return Wanted(name=name, load=load, **{**given, **changed})  # type: ignore[arg-type]


MEASURED = profile(measured_device("quick", 1.0), measured_device("slow", 1 / 3))


def test_a_slow_device_gets_as_many_layers_as_keep_it_busy_for_as_long_as_the_other() -> None:
    (placed,) = place_models([wanted()], MEASURED)
    assert placed.placement is not None
    layers = dict(placed.stages)
    # With the output head, which is worth eight layers, it has one layer; without it, nine.
    assert layers["slow"] < layers["quick"] / 2
    assert placed.placement.busy_s[0] == pytest.approx(placed.placement.busy_s[1], rel=0.1)


def test_a_hot_model_makes_its_devices_slower_for_the_next_one() -> None:
    alike = profile(measured_device("a", 1.0), measured_device("b", 1.0))
    hot = wanted("hot", 0.9, devices=("a", "b"), mode="lr")
    cold = wanted("cold", 0.0, devices=("a", "b"), mode="lr")
    # Asked in either order, the hot one goes first, and each has a device of its own.
    for models in ([hot, cold], [cold, hot]):
        placed = {each.wanted.name: each.stages for each in place_models(models, alike)}
        assert len(placed["hot"]) == len(placed["cold"]) == 1
        assert placed["hot"] != placed["cold"]


def test_models_that_fit_only_if_the_largest_goes_first_are_all_placed() -> None:
    tight = profile(measured_device("a", 1.0, 4 * GIB), measured_device("b", 0.9, 3 * GIB))
    small = wanted("small", 0.5, devices=("a", "b"), mode="he", kv_bytes=0)
    large = wanted("large", devices=("a",), mode="he", kv_bytes=1.5 * GIB)
    placed = place_models([small, large], tight)
    assert [each.stages for each in placed] == [[("b", 30)], [("a", 30)]]


def test_a_model_that_fits_nowhere_says_what_it_needs() -> None:
    small = profile(measured_device("quick", 1.0, GIB), measured_device("slow", 1.0, GIB))
    (placed,) = place_models([wanted()], small)
    assert placed.placement is None
    assert "needs 1.9 GiB" in explanation.why_not(placed)
    assert explanation.as_dict(placed)["fits"] is False


def test_a_model_that_was_not_timed_is_predicted_by_bandwidth_and_arithmetic() -> None:
    device = measured_device("quick", 1.0)
    times = stage_times(device, "another", SHAPE, 10)
    assert times.layer_s == pytest.approx(3.5e6 * 4 / 10e9 + 2 * 3.5e6 * 10 / 50e9)
    assert times.last_s == pytest.approx(28e6 * 4 / 10e9 + 2 * 28e6 * 10 / 50e9)
    measured = ModelTimes(
        model="demo",
        times=(StageTimes(batch=2, layer_s=1.0), StageTimes(batch=4, layer_s=3.0)),
    )
    device = device.model_copy(update={"models": (measured,)})
    figures = [stage_times(device, "demo", SHAPE, batch).layer_s for batch in (1, 2, 3, 4, 8)]
    assert figures == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_a_profile_comes_back_from_its_file_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    with pytest.raises(ConfigError, match=r"loomserve profile devices"):
        device_profile.load(path)
    device_profile.save(MEASURED, path)
    assert device_profile.load(path) == MEASURED
    path.write_text("devices: [{name: a}]")
    with pytest.raises(ConfigError, match=r"measured_at"):
        device_profile.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"not YAML"):
        device_profile.load(path)
    with pytest.raises(ConfigError, match=r"'other' is not in the profile"):
        MEASURED.device("other")


def model_folder(folder: Path, layers: int = 6) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["A"], "hidden_size": 8}')
    (folder / "tokenizer.json").write_text("{}")
    tensors = {f"model.layers.{i}.mlp.weight": np.zeros((8, 16), "f4") for i in range(layers)}
    save_file({**tensors, "model.embed_tokens.weight": np.zeros((100, 8), "f4")},
              folder / "model.safetensors")  # fmt: skip
    return folder


def test_a_models_files_say_its_layers_and_tied_embeddings_count_as_a_head(tmp_path: Path) -> None:
    assert model_files.read(model_folder(tmp_path / "m")) == ModelShape(6, 8, 128.0, 800, 800)


CONFIG = """
devices:
  - {name: quick, cores: [0]}
  - {name: slow, cores: [1]}
models:
  - name: m
    source: ./m
    devices: [quick, slow]
    kv_cache_memory: 64MiB
"""


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["loomserve", *words])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    return int(exit_.value.code or 0)


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    model_folder(tmp_path / "m")
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG + "    pipeline: {mode: balanced, profile: devices.yaml}\n")
    device_profile.save(MEASURED, tmp_path / "devices.yaml")
    return path


def test_the_command_prints_stages_and_why_not_others(
    configured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "placement", str(configured)) == 0
    said = capsys.readouterr().out
    for words in ("m (balanced)", "bottleneck", "even split", "no other map", "to keep it"):
        assert words in said
    assert run(monkeypatch, "placement", str(configured), "--json", "--mode", "he") == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["stages"] == [
        {"device": "quick", "layers": 6, "memory": model["stages"][0]["memory"],
         "busy_s": model["period_s"]}
    ]  # fmt: skip
    assert model["exact"]


def test_the_command_exits_with_1_if_a_model_does_not_fit_and_with_2_if_it_is_asked_wrongly(
    configured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = profile(measured_device("quick", 1.0, GIB // 2), measured_device("slow", 1.0, GIB // 2))
    device_profile.save(small, configured.parent / "small.yaml")
    path = str(configured.parent / "small.yaml")
    assert run(monkeypatch, "placement", str(configured), "--profile", path) == 1
    assert "does not fit" in capsys.readouterr().out
    assert run(monkeypatch, "placement", str(configured), "--mode", "fast") == 2
    assert "he, lr, balanced" in capsys.readouterr().err
    assert run(monkeypatch, "placement", str(configured), "--load", "m=2") == 2
    assert "MODEL=SHARE" in capsys.readouterr().err
    configured.write_text(CONFIG)
    assert run(monkeypatch, "placement", str(configured)) == 2
    assert "no model has a pipeline" in capsys.readouterr().err


def test_an_engines_stages_are_those_written_or_those_of_helr(configured: Path) -> None:
    (model,) = parse(configured.read_text()).models
    placed = stages_of(model, configured.parent)
    assert sum(layers for _, layers in placed) == 6
    text = CONFIG + "    pipeline: {layers: [4, 2]}\n"
    (model,) = parse(text).models
    assert stages_of(model, configured.parent) == [("quick", 4), ("slow", 2)]
    small = profile(measured_device("quick", 1.0, GIB // 2), measured_device("slow", 1.0, GIB // 2))
    device_profile.save(small, configured.parent / "devices.yaml")
    (model,) = parse(configured.read_text()).models
    with pytest.raises(StartError, match=r"does not fit"):
        stages_of(model, configured.parent)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ("pipeline: {layers: [30]}", r"pipeline\.layers: .* layers of each"),
        ("pipeline: {layers: [30, 0]}", r"pipeline\.layers\[1\]"),
        ("replicas: 2\n    pipeline: {}", r"replicas: .* one replica"),
        ("pipeline: {mode: best}", r"pipeline\.mode"),
        ("pipeline: {}\n    engine: {pipeline_parallel_size: 2}", r"engine\.pipeline_parallel"),
        ("pipeline: {}\n    lending: {lend_memory: 64MiB}", r"lending: .* leave it out"),
        ("pipeline: {}\nkvstore: {}", r"pipeline: .* kvstore to false"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(more: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        parse(CONFIG + f"    {more}\n")


def test_a_pipeline_is_one_replica_with_a_process_a_stage() -> None:
    (model,) = parse(CONFIG + "    pipeline: {}\n").models
    assert model.most_replicas == 1
    assert replica_bytes(model, 0) == ENGINE_BYTES + 2 * STAGE_BYTES + 64 * 2**20
    (replicated,) = parse(CONFIG).models
    assert replicated.most_replicas == 2


def test_the_environment_binds_each_stage_to_its_device() -> None:
    cores = [Device(name="a", cores=(2, 3)), Device(name="b", cores=(0, 1))]
    assert pipeline_environment(cores, [20, 10]) == {
        "VLLM_PP_LAYER_PARTITION": "20,10",
        "VLLM_CPU_OMP_THREADS_BIND": "2,3|0,1",
        "OMP_NUM_THREADS": "2",
    }
    gpus = [Device(name=f"g{i}", kind="cuda", gpu=i) for i in (3, 1)]
    assert pipeline_environment(gpus, [2, 4]) == {
        "VLLM_PP_LAYER_PARTITION": "2,4",
        "CUDA_VISIBLE_DEVICES": "3,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }

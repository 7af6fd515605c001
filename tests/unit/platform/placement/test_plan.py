"""``loomserve plan``: of a file without a platform, and of a platform."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.cli import placement as command
from loomserve.platform.config import load
from loomserve.platform.devices import machine
from loomserve.platform.devices.machine import MachineParts
from loomserve.platform.devices.memory import ENGINE_BYTES, platform_bytes
from loomserve.platform.devices.shortage import memory_bounds
from loomserve.platform.models import catalog, simulated
from loomserve.platform.placement import own_placement
from loomserve.platform.placement.plan import plan_of_file, plan_of_platform
from loomserve.platform.state import (
    DeviceState,
    ModelState,
    ModelStatus,
    PlatformState,
    SoftwareVersions,
)

MIB, GIB = 2**20, 2**30


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three models on a machine of two cores."""
    parts = MachineParts(((0, 1),), {}, 16 * GIB)
    monkeypatch.setattr(own_placement, "parts_here", lambda: parts)
    monkeypatch.setattr(catalog, "resolve", lambda *_, **__: "org/hub-id")
    path = tmp_path / "many.yaml"
    path.write_text("models: {a: demo, b: demo, c: demo}")
    return path


def test_a_file_s_plan_says_where_models_go_and_why(file: Path) -> None:
    plan = plan_of_file(file, print)
    each_gets = int((15 * GIB - platform_bytes(1, load(file).models)) / 2) // MIB * MIB
    assert [(each.name, each.place, each.memory) for each in plan.devices] == [
        ("core0", "core 0", each_gets), ("core1", "core 1", each_gets),
    ]  # fmt: skip
    assert [(each.name, each.devices, each.start) for each in plan.models] == [
        ("a", ("core0",), "now"), ("b", ("core1",), "now"), ("c", ("core0",), "on_demand"),
    ]  # fmt: skip
    assert all(each.why and each.size == ENGINE_BYTES + GIB // 2 for each in plan.models)


def printed(*words: str) -> str:
    """What the command prints."""
    app = typer.Typer()
    app.command()(command.plan)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_it(file: Path) -> None:
    shown = json.loads(printed(str(file), "--json"))
    assert [each["name"] for each in shown["models"]] == ["a", "b", "c"]
    assert "core0 had the most room: 6.4 GiB" in printed(str(file))


def test_what_a_file_says_itself_is_no_decision(tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(
        "devices: [{name: d, cores: [0]}]\nmodels: [{name: a, source: demo, devices: [d]}]"
    )
    (model,) = plan_of_file(path, print).models
    assert (model.devices, model.size, model.why) == (("d",), None, "the configuration says")


def test_a_plan_says_what_reads_a_models_tool_calls(tmp_path: Path) -> None:
    simulated.fetch()
    path = tmp_path / "given.yaml"
    path.write_text(
        "devices: [{name: d, cores: [0]}]\nmodels: [{name: a, source: simulated, devices: [d], "
        "engine: {reasoning_parser: null}}]"
    )
    (model,) = plan_of_file(path, print).models
    assert model.parsers is not None
    assert (model.parsers.tool_call.name, model.parsers.reasoning.name) == ("hermes", None)
    assert "reasoning: none (the configuration says)" in printed(str(path))
    (shown,) = json.loads(printed(str(path), "--json"))["models"]
    assert shown["parsers"]["tool_call"]["name"] == "hermes"


def test_nodes_of_a_cluster_are_not_known_without_it(file: Path) -> None:
    file.write_text("cluster: {}\nmodels: {a: demo}")
    with pytest.raises(ConfigError, match="once loomserve serve has joined it"):
        plan_of_file(file, print)


def test_a_platform_s_plan_is_what_it_has_decided() -> None:
    state = PlatformState(
        versions=SoftwareVersions(loomserve="0", vllm="0", ray="0", python="3"),
        uptime_s=1,
        devices=(DeviceState(name="core0", kind="cpu", place="core 0", memory=GIB),),
        models=(
            ModelState(
                name="a",
                source="demo",
                status=ModelStatus.UNLOADED,
                target_replicas=1,
                router="round_robin",
                devices=("core1", "core0"),
                placement="core1 has least to do",
            ),
        ),
    )
    (model,) = plan_of_platform(state).models
    assert (model.devices, model.start, model.why) == (
        ("core1",), "unloaded", "core1 has least to do",
    )  # fmt: skip


def test_a_container_s_bound_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = machine.available_memory()
    here = partial(memory_bounds, tmp_path, tmp_path / "own")
    monkeypatch.setattr(machine, "memory_bounds", here)
    assert machine.available_memory() == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("800000")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    assert machine.available_memory() == 500000
    (tmp_path / "memory.max").write_text("max")
    assert machine.available_memory() > 500000

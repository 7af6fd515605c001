"""Which Ray a platform runs on, and what is said where a cluster cannot be joined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import ray
from ray import serve

from loomserve.deployments import node_checks, ray_start
from loomserve.deployments.ray_start import JoinedRay, OwnRay, Unless, platform_ray
from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Config, parse
from loomserve.platform.nodes import lone_ray
from loomserve.platform.nodes.resources import offered
from loomserve.platform.run.folder import RunFolder

CONFIG = """\
cluster:
  address: 10.0.0.1:6379
  join_timeout_s: 0.1
devices:
  - {name: a, cores: [0], node: n1}
  - {name: b, cores: [0, 5], node: n2}
models:
  - {name: m, source: demo, devices: [a]}
  - {name: o, source: nowhere, devices: [b]}
"""


def of_cluster(text: str = CONFIG) -> Config:
    return parse(text)


def no_say(_: str) -> None: ...


def test_without_a_cluster_ray_is_of_this_machine(tmp_path: Path) -> None:
    alone = parse("devices: [{name: a, cores: [0]}]\nmodels: []")
    assert isinstance(platform_ray(alone, tmp_path, (), no_say), OwnRay)


def test_the_tokens_file_is_beside_the_configuration(tmp_path: Path) -> None:
    config = of_cluster(CONFIG.replace("  join", "  token_file: mine\n  join"))
    joined = platform_ray(config, tmp_path, (), no_say)
    assert isinstance(joined, JoinedRay)
    with pytest.raises(StartError, match=str(tmp_path / "mine")):
        joined.start(lambda: False)


def test_an_address_is_asked_for_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = of_cluster(CONFIG.replace("  address: 10.0.0.1:6379\n", ""))
    with pytest.raises(StartError, match=r"cluster\.address is missing"):
        platform_ray(config, tmp_path, (), no_say).start(lambda: False)


def test_a_node_that_does_not_come_is_named_with_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_start, "_nodes_up", lambda: {"n1", "other"})
    said: list[str] = []
    joined = JoinedRay(of_cluster(), tmp_path / "token", said.append)
    with pytest.raises(StartError, match=r"devices\[1\]\.node: .* no node 'n2'; it has n1, other"):
        joined._await_nodes()
    assert said == ["waiting for nodes: n2"]


def test_a_cluster_has_one_serve_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(ray_start, "_COMMAND_TIMEOUT_S", 0.05)
    first = ray_start._only_command("10.0.0.1:6379")
    with pytest.raises(StartError, match="another loomserve serve runs on the cluster"):
        ray_start._only_command("10.0.0.1:6379")
    ray_start._only_command("10.0.0.2:6379").release()
    first.release()
    ray_start._only_command("10.0.0.1:6379").release()


def test_what_this_command_did_not_deploy_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(ray_start, "_delete_ours", lambda: deleted.append("ours"))
    JoinedRay(of_cluster(), tmp_path / "token", no_say).delete_platform()
    assert deleted == []


ALONE = "devices: [{name: a, cores: [0]}]\nmodels: []"


class FailingRay:
    """Ray's processes, of which one ends as it starts."""

    started: ClassVar[list[Path]] = []
    closed: ClassVar[list[Path]] = []

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def start(self, resources: object, unless: Unless) -> str:
        self.started.append(self._run.path)
        raise StartError("Ray did not start: its raylet has ended (for want of ports)")

    def ended(self, wait_s: float = 0.0) -> None: ...

    def close(self) -> None:
        self.closed.append(self._run.path)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnRay]:
    """On a machine whose load is 33, with Ray's part made up."""
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(ray_start, "LoneRay", FailingRay)
    monkeypatch.setattr(FailingRay, "started", [])
    monkeypatch.setattr(FailingRay, "closed", [])
    monkeypatch.setattr(ray_start, "set_environment", lambda _: None)
    monkeypatch.setattr(ray_start, "KeptForkServer", lambda *_: pytest.fail("before Ray is up"))
    monkeypatch.setattr(ray_start, "_idle_cores", lambda: 0.1)
    monkeypatch.setattr(lone_ray.os, "getloadavg", lambda: (33.4, 0.0, 0.0))
    monkeypatch.setattr(lone_ray.os, "cpu_count", lambda: 2)
    # Else it would end what the tests' own process has started.
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    said.clear()
    own = OwnRay(parse(ALONE), (), said.append)
    yield own
    own.kill()


said: list[str] = []


def test_a_ray_that_does_not_start_is_started_once_more_and_why_is_said(alone: OwnRay) -> None:
    with pytest.raises(StartError) as raised:
        alone.start(lambda: False)
    first, second = FailingRay.started
    assert first != second, "each in a run of its own"
    alone.kill()
    assert FailingRay.closed == [first, second]
    assert said == [
        "Ray did not start: its raylet has ended (for want of ports); starting it once more"
    ]
    assert str(raised.value) == (
        "Ray did not start: its raylet has ended (for want of ports). The machine is busy (load "
        "average 33 on 2 cores): try again when it is less so"
    )


class NotedForkServer:
    started = 0
    stopped = 0

    def __init__(self, *_: object) -> None: ...

    def start(self) -> None:
        NotedForkServer.started += 1

    def stop(self) -> None:
        NotedForkServer.stopped += 1


@pytest.mark.usefixtures("alone")
def test_vllm_is_imported_beside_rays_first_start_where_a_core_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_start, "_idle_cores", lambda: 0.9)
    monkeypatch.setattr(ray_start, "KeptForkServer", NotedForkServer)
    monkeypatch.setattr(ray_start, "preloaded", lambda _: ())
    own = OwnRay(parse(ALONE), (), said.append)
    with pytest.raises(StartError):
        own.start(lambda: False)
    assert len(FailingRay.started) == 2
    assert (NotedForkServer.started, NotedForkServer.stopped) == (1, 1), "not beside the second"
    own.kill()


def test_no_core_is_idle_where_a_process_may_not_use_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "has_quota", lambda: False)
    monkeypatch.setattr(ray_start.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(ray_start.psutil, "cpu_times_percent", lambda: SimpleNamespace(idle=50.0))
    monkeypatch.setattr(ray_start.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert ray_start._idle_cores() == 2.0
    monkeypatch.setattr(ray_start.os, "sched_getaffinity", lambda _: {0, 1})
    assert ray_start._idle_cores() == 0.0
    monkeypatch.setattr(ray_start.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(ray_start, "has_quota", lambda: True)
    assert ray_start._idle_cores() == 0.0


def test_nothing_is_asked_of_a_ray_that_was_not_joined(
    alone: OwnRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shutdown", "status", "delete"):
        monkeypatch.setattr(serve, name, lambda *_: pytest.fail("it would start another Ray"))
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("another Ray"))
    alone.delete_platform()
    with pytest.raises(StartError):
        alone.start(lambda: False)
    alone.delete_platform()
    alone.end()


def nodes(**resources: dict[str, int]) -> list[dict[str, Any]]:
    return [{"Alive": True, "NodeID": name, "Resources": each} for name, each in resources.items()]


def test_a_core_that_a_node_lacks_is_named_with_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    there = nodes(
        n1=offered("n1", range(8), (), state=True), n2=offered("n2", range(2), (), state=False)
    )
    monkeypatch.setattr(node_checks.ray, "nodes", lambda: there)
    with pytest.raises(
        StartError, match=r"devices\[1\]\.cores: node 'n2' has no core 5.*; it has 0, 1"
    ):
        node_checks._check_devices(of_cluster())
    there[1]["Resources"] = offered("n2", range(6), (), state=False)
    node_checks._check_devices(of_cluster())
    there[1]["Alive"] = False
    with pytest.raises(StartError, match="has no core 0, 5"):
        node_checks._check_devices(of_cluster())


def test_weights_that_a_node_lacks_are_named_with_their_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_checks, "verify", no_say)
    monkeypatch.setattr(node_checks, "check_compiler", lambda _: None)
    monkeypatch.setattr(node_checks.os, "sched_getaffinity", lambda _: {0, 5})
    with pytest.raises(StartError, match=r"^models\[1\]\.source: "):
        node_checks._checked(
            of_cluster(CONFIG.replace("source: nowhere", "source: ./nowhere")), "n2", tmp_path
        )


def test_a_core_that_processes_of_a_node_may_not_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_checks, "verify", no_say)
    monkeypatch.setattr(node_checks, "check_compiler", lambda _: None)
    monkeypatch.setattr(node_checks.os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(StartError, match="device 'b' names core 5"):
        node_checks._checked(of_cluster(), "n2", tmp_path)

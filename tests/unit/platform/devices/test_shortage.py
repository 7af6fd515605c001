"""How much memory is used, of made-up files, and engines that wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from loomserve.platform.devices import shortage
from loomserve.platform.devices.shortage import (
    MemoryBound,
    has_quota,
    has_room,
    memory_bounds,
    note_given_back,
    prefer_for_killing,
    room_for_engine,
    threshold,
    used_share,
)

MACHINE = MemoryBound(1000, 400)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=MACHINE.total, available=MACHINE.available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(shortage, "_LOOK_S", 0.01)


def group(path: Path, most: str, used: int, inactive: int | None = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{most}\n")
    (path / "memory.current").write_text(f"{used}\n")
    stat = "anon 7\n" if inactive is None else f"anon 7\ninactive_file {inactive}\n"
    (path / "memory.stat").write_text(stat)


def bounds(tmp_path: Path, own: str) -> list[MemoryBound]:
    (tmp_path / "own").write_text(own)
    return memory_bounds(tmp_path / "cgroup", tmp_path / "own")


def test_without_groups_the_machine_is_all_there_is(tmp_path: Path) -> None:
    assert memory_bounds(tmp_path / "none", tmp_path / "neither") == [MACHINE]
    assert bounds(tmp_path, "12:memory:/old\n") == [MACHINE]


def test_a_pods_bound_is_seen_at_the_root_of_its_own_view(tmp_path: Path) -> None:
    group(tmp_path / "cgroup", "500", 450, inactive=150)
    for own in ("0::/\n", "0::/kubepods/of/the/host\n"):
        assert bounds(tmp_path, own) == [MACHINE, MemoryBound(500, 200)]


def test_each_group_above_bounds_too_and_one_without_a_bound_does_not(tmp_path: Path) -> None:
    group(tmp_path / "cgroup/user/me", "300", 100)
    group(tmp_path / "cgroup/user", "max", 100)
    group(tmp_path / "cgroup", "200", 190, inactive=None)
    found = bounds(tmp_path, "1:name=systemd:/x\n0::/user/me\n")
    assert found == [MACHINE, MemoryBound(300, 200), MemoryBound(200, 10)]
    assert used_share(found) == 0.95


def test_a_group_whose_files_are_odd_is_passed_over(tmp_path: Path) -> None:
    group(tmp_path / "cgroup", "500", 450)
    (tmp_path / "cgroup/memory.stat").write_text("odd")
    assert bounds(tmp_path, "0::/\n") == [MACHINE]


@pytest.mark.parametrize(
    ("file", "text", "bounded"),
    [
        (None, "", False),
        ("user/me/cpu.max", "max 100000\n", False),
        ("user/me/cpu.max", "50000 100000\n", True),
        ("user/cpu.max", "50000 100000\n", True),
        ("cpu.max", "50000 100000\n", True),
        ("user/other/cpu.max", "50000 100000\n", False),
        ("cpu/cpu.cfs_quota_us", "-1\n", False),
        ("cpu/cpu.cfs_quota_us", "50000\n", True),
    ],
)
def test_a_quota_of_its_own_group_or_of_one_above_bounds_a_process(
    file: str | None, text: str, bounded: bool, tmp_path: Path
) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/user/me\n")
    (groups / "user/me").mkdir(parents=True)
    if file is not None:
        (groups / file).parent.mkdir(exist_ok=True)
        (groups / file).write_text(text)
    assert has_quota(groups, own) is bounded


@pytest.mark.parametrize(("given", "is_"), [(None, 0.95), ("0.5", 0.5), ("half", 0.95)])
def test_the_threshold_is_an_environment_variable(
    given: str | None, is_: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOMSERVE_MEMORY_THRESHOLD", raising=False)
    if given is not None:
        monkeypatch.setenv("LOOMSERVE_MEMORY_THRESHOLD", given)
    assert threshold() == is_


@pytest.mark.parametrize(("size", "fits"), [(0, True), (350, True), (351, False)])
def test_there_is_room_below_the_threshold_of_each_bound(size: int, fits: bool) -> None:
    assert has_room([MACHINE, MemoryBound(10_000, 9_000)], size) is fits
    assert not has_room([MACHINE, MemoryBound(100, 4)], 0)


def test_an_engine_waits_for_what_the_one_before_gave_back(tmp_path: Path) -> None:
    free = [400, 700, 799, 800]
    said: list[str] = []
    note_given_back(tmp_path, "org/m", 750)

    def now() -> list[MemoryBound]:
        return [MemoryBound(1000, free.pop(0))]

    asyncio.run(room_for_engine(tmp_path, "org/m", said.append, now))
    assert not free
    assert len(said) == 1
    assert "org/m" in said[0]
    # The next one, and those of other models, wait for nothing.
    for model in ("org/m", "org/other"):
        free.append(60)
        asyncio.run(room_for_engine(tmp_path, model, said.append, now))
    assert not free


def test_no_engine_starts_while_memory_is_short(tmp_path: Path) -> None:
    free = [40, 49, 50]
    wait = room_for_engine(tmp_path, "m", lambda _: None, lambda: [MemoryBound(1000, free.pop(0))])
    asyncio.run(wait)
    assert not free


@pytest.mark.parametrize(("before", "after"), [("0", "800"), ("900", "900")])
def test_the_kernel_is_told_to_end_engines_first(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text(before)
    monkeypatch.setattr(shortage, "_OOM_ADJUSTMENT", file)
    prefer_for_killing()
    assert file.read_text() == after

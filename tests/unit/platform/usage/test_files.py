"""Lines of usage are appended whole, by several processes at once, and read back after any end."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Server
from loomserve.platform.usage.files import (
    UsageFiles,
    UsageRecord,
    check_usage_folder,
    minute_of,
    usage_folder_path,
)

ALL = ("2000-01-01T00:00Z", "2100-01-01T00:00Z")


def record(minute: str = "2026-11-26T01:30Z", key: str = "alice", **sums: float) -> UsageRecord:
    return UsageRecord(minute, key, "chat", **sums)  # type: ignore[arg-type]


def test_minutes_of_utc_sort_as_text() -> None:
    assert minute_of(0) == "1970-01-01T00:00Z"
    assert minute_of(59.9) == minute_of(0) < minute_of(60)


def test_what_was_appended_is_read_in_its_span(tmp_path: Path) -> None:
    files = UsageFiles(tmp_path / "made")
    minutes = ["2026-10-31T23:59Z", "2026-11-01T00:00Z", "2026-11-01T00:01Z"]
    files.append(record(minute, device_seconds=0.25) for minute in reversed(minutes))
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "2026-10.jsonl",
        "2026-11.jsonl",
    ]
    assert [each.minute for each in files.read(minutes[0], minutes[2])] == minutes[:2]
    assert [each.minute for each in files.read(minutes[1], minutes[2])] == minutes[1:2]
    assert sum(each.device_seconds for each in files.read(*ALL)) == 0.75


def test_nodes_write_files_of_their_own_and_read_all(tmp_path: Path) -> None:
    one, other = UsageFiles(tmp_path, "n1"), UsageFiles(tmp_path, "n2")
    one.append([record(key="alice")])
    other.append([record(key="bob")])
    assert {path.name for path in tmp_path.iterdir()} == {"2026-11.n1.jsonl", "2026-11.n2.jsonl"}
    assert {each.key for each in one.read(*ALL)} == {"alice", "bob"}


def _append(folder: Path, gateway: int) -> None:
    files = UsageFiles(folder)
    for _ in range(50):
        files.append(record(key=f"k{gateway}", requests=1) for _ in range(20))


def test_gateways_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        list(pool.map(_append, [tmp_path] * 4, range(4)))
    (file,) = tmp_path.iterdir()
    assert len(file.read_bytes().splitlines()) == 4 * 50 * 20
    read = list(UsageFiles(tmp_path).read(*ALL))
    assert {each.key for each in read} == {"k0", "k1", "k2", "k3"}
    assert sum(each.requests for each in read) == 4 * 50 * 20


def test_a_line_that_a_power_cut_tore_is_passed_over_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = UsageFiles(tmp_path)
    files.append([record(key="before")])
    (file,) = tmp_path.iterdir()
    with file.open("ab") as torn:
        torn.write(b'{"minute":"2026-11')
    files.append([record(key="after")])
    assert [each.key for each in files.read(*ALL)] == ["before", "after"]
    assert "1 lines" in caplog.text


def test_what_could_be_written_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = UsageFiles(tmp_path)
    files.append([record(key="before")])
    whole = os.write

    def write(file: int, content: bytes) -> int:
        if len(content) < 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(file, bytes(content)[:-20])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        files.append([record(key="lost")])
    monkeypatch.undo()
    files.append([record(key="after")])
    assert [each.key for each in files.read(*ALL)] == ["before", "after"]


def test_the_folder_is_found_and_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    assert usage_folder_path(Server(port=8001), tmp_path) == tmp_path / "home/usage-8001"
    server = Server.model_validate({"usage": {"folder": "used"}})
    assert usage_folder_path(server, tmp_path) == tmp_path / "used"
    check_usage_folder(tmp_path / "a/used")
    assert list((tmp_path / "a/used").iterdir()) == []


def test_a_folder_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"server\.usage\.folder.*cannot be written to"):
        check_usage_folder(tmp_path / "file")

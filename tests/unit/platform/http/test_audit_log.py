"""The file of an audit log: private, bounded, and no trouble to whoever writes."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Server
from loomserve.platform.http.audit_log import AuditLog, audit_log_path, check_audit_log


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_each_platform_of_a_user_has_its_own_file_beside_the_configuration_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    assert audit_log_path(Server(port=8001), tmp_path) == tmp_path / "home/audit-8001.log"
    assert audit_log_path(Server(audit_log="logs/a"), tmp_path) == tmp_path / "logs/a"


def test_lines_are_written_in_order_to_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.touch(0o644)
    log = AuditLog(path)
    for number in range(100):
        log.write(f"line {number} 100 % of it")
    log.close()
    assert path.read_text().splitlines() == [f"line {n} 100 % of it" for n in range(100)]
    assert mode(path) == 0o600


def test_a_log_that_is_opened_again_goes_on(tmp_path: Path) -> None:
    for line in ("one", "two"):
        log = AuditLog(tmp_path / "audit.log")
        log.write(line)
        log.close()
    assert (tmp_path / "audit.log").read_text() == "one\ntwo\n"


def test_a_line_waits_for_a_file_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()
    really_open = os.open
    left = False

    def open_if_left(*args: Any) -> int:
        if not left:
            tried.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really_open(*args)

    monkeypatch.setattr(os, "open", open_if_left)
    log = AuditLog(tmp_path / "audit.log")
    log.write("one")
    log.write("two")
    assert tried.wait(60)
    left = True
    log.close()
    monkeypatch.undo()
    assert (tmp_path / "audit.log").read_text().split() == ["one", "two"]


def test_full_files_are_moved_away_and_the_oldest_are_lost(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.log", file_bytes=1000)
    for number in range(1000):
        log.write(f"{number:099}")
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 10
    assert all(path.stat().st_size <= 1000 and mode(path) == 0o600 for path in files)
    assert int((tmp_path / "audit.log").read_text().splitlines()[-1]) == 999


def test_a_full_disk_is_told_once_and_the_log_goes_on_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path / "audit.log")
    log.write("before")
    wait_for_lines(tmp_path / "audit.log", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        written = log._written.stream
        assert written is not None
        written.close()  # what follows has to open the file, and cannot
        for number in range(5):
            log.write(f"lost {number}")
        deadline = time.monotonic() + 5
        while log._queued.queue.qsize() or not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.05)
    with (tmp_path / "audit.log").open("a") as file:
        file.write("cut o")
    log.write("after")
    log.close()
    lines = (tmp_path / "audit.log").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    told = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(told) == 1
    assert str(tmp_path / "audit.log") in told[0].getMessage()


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 5
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_is_always_full_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(Path("/dev/full"))
    for _ in range(3):
        log.write("x" * 100_000)
    log.close()
    assert len(caplog.records) == 1
    assert mode(Path("/dev/full")) != 0o600


def test_whoever_writes_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path / "audit.log")
    stuck = threading.Event()
    original = os.open

    def slow(path: str, flags: int, mode: int = 0o777) -> int:
        stuck.wait(10)
        return original(path, flags, mode)

    monkeypatch.setattr(os, "open", slow)
    log.write("one")
    log.write("two")
    assert not (tmp_path / "audit.log").exists()
    stuck.set()
    log.close()
    assert (tmp_path / "audit.log").read_text() == "one\ntwo\n"


def test_the_check_makes_the_file_and_its_folder_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "audit.log"
    check_audit_log(path)
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "no folder"])
def test_what_is_no_file_of_ours_ends_the_start(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "audit.log"
    with pytest.raises(StartError, match=r"server\.audit_log.*cannot be written"):
        check_audit_log(path)
    assert not (tmp_path / "elsewhere").exists()


def test_several_processes_have_one_file(tmp_path: Path) -> None:
    """Here two logs, which have nothing in common but the file."""
    logs = [AuditLog(tmp_path / "audit.log", file_bytes=2000) for _ in range(2)]

    def write(log: AuditLog, name: str) -> None:
        for number in range(60):
            log.write(f"{name} {number:096}")

    threads = [
        threading.Thread(target=write, args=(log, name))
        for log, name in zip(logs, "ab", strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    files = sorted(tmp_path.iterdir())
    lines = [line for file in files for line in file.read_text().splitlines()]
    for name in "ab":
        assert sorted(line for line in lines if line[0] == name) == [
            f"{name} {number:096}" for number in range(60)
        ]
    # None was moved away before it was full, but for a line that another process was writing.
    assert len(files) == 6
    assert all(file.stat().st_size <= 2200 for file in files)

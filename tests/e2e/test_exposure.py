"""What a running platform shows other machines and other users: its server, and nothing else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loomserve.kvstore.server.options import arena_path
from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.run import leftovers
from loomserve.platform.run.folder import RUN_VARIABLE
from loomserve.platform.run.shared_memory import SHARED_MEMORY
from tests.e2e.conftest import Platform
from tests.forks import descendants, in_the_place_of

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

# As nobody, after all names have been read from the standard input.
TRY_ALL = """
import os, socket, sys
paths = sys.stdin.read().splitlines()
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for path in paths:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        print("opened", path)
    except OSError:
        pass
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
        print("connected to", path)
    except OSError:
        pass
print("tried", len(paths))
"""


def processes(platform: Platform) -> list[psutil.Process]:
    return descendants(platform.process)


def environments(platform: Platform) -> list[dict[str, str]]:
    """Of the run's processes: one of Python's own was there before it, and its guard is none.

    What tests' own process has forked shows that one's environment, whatever it has itself.
    """
    forked = [in_the_place_of(one) for one in processes(platform)]
    others = {each for one in forked if one is not None for each in (one, *one.children(True))}
    found = [
        one.environ()
        for one in processes(platform)
        if one not in others and leftovers.__name__ not in one.cmdline()
    ]
    of_run = [each for each in found if RUN_VARIABLE in each]
    assert len(of_run) >= len(found) - 1
    return of_run


def run_folder(platform: Platform) -> Path:
    (folder,) = {each[RUN_VARIABLE] for each in environments(platform)}
    return Path(folder)


def shared_memory(platform: Platform) -> set[Path]:
    """Without what stores of other platforms may have left, which are of other ports, and what
    tests make."""
    store = arena_path(int(platform.url.rpartition(":")[2])).parent
    others = {path for path in store.parent.iterdir() if path != store}
    others.update(SHARED_MEMORY.glob("loomserve-test-*"))
    return {
        path
        for path in SHARED_MEMORY.rglob("*")
        if (path.name.startswith(("psm_", "loomserve-")) or "loomserve-" in path.parts[3])
        and not others.intersection((path, *path.parents))
    }


def test_nothing_listens_beyond_loopback(platform: Platform) -> None:
    found = {
        (one.name(), socket.laddr.ip)
        for one in [platform.process, *processes(platform)]
        for socket in one.net_connections("inet")
        if socket.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }
    assert len(found) > 5, "nothing was looked at"
    assert [one for one in found if not is_loopback(one[1])] == []


def test_every_process_asks_for_the_runs_own_token(platform: Platform) -> None:
    token = str(run_folder(platform) / "token")
    found = environments(platform)
    assert {each["RAY_AUTH_MODE"] for each in found} == {"token"}
    assert {each["RAY_AUTH_TOKEN_PATH"] for each in found} == {token}


def test_what_the_platform_makes_is_for_its_user_alone(platform: Platform) -> None:
    folder = run_folder(platform)
    # Ray opens its own folders to all, so only the one around them keeps others out.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [path for path in folder.rglob("*") if path.is_file() or path.is_socket()]
    assert len(files) > 20, "nothing was looked at"
    open_to_others = [
        path for path in (*files, *shared_memory(platform)) if path.lstat().st_mode & 0o077
    ]
    assert open_to_others == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_opens_nothing_and_connects_to_nothing(platform: Platform) -> None:
    found = [*run_folder(platform).rglob("*"), *shared_memory(platform)]
    tried = subprocess.run(
        [sys.executable, "-c", TRY_ALL],
        input="\n".join(str(path) for path in found),
        capture_output=True,
        text=True,
        check=True,
    )
    assert tried.stdout == f"tried {len(found)}\n"

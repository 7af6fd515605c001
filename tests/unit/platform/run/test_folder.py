"""A run's folder is its user's alone, says what its processes need, and shows whether it runs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.run.folder import RunFolder, ended_runs, runs_folder
from loomserve.platform.run.ray_environment import set_environment

MODES = {"ray": 0o700, "sockets": 0o700, "tmp": 0o700, "token": 0o600}
TRY_ALL = """
import os, sys
from pathlib import Path
found = [sys.argv[1], *Path(sys.argv[1]).rglob("*")]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(len(found), sum(os.access(path, os.R_OK) for path in found))
"""


pytestmark = pytest.mark.usefixtures("temporary_folder")


def test_nobody_else_gets_into_a_run() -> None:
    before = os.umask(0)
    try:
        run = RunFolder.create()
    finally:
        os.umask(before)
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run.path.iterdir()}
    assert made == MODES
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert len(run.token.read_text()) == 64
    assert run.token.read_text() != RunFolder.create().token.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_opens_nothing_of_a_run() -> None:
    run = RunFolder.create()
    # Ray makes its folders writable for all.
    run.ray.chmod(0o777)
    (run.ray / "log").touch(0o644)
    tried = subprocess.run(
        [sys.executable, "-c", TRY_ALL, str(run.path)], capture_output=True, text=True, check=True
    )
    assert tried.stdout == "6 0\n"


def test_a_folder_of_runs_that_others_get_into_is_refused() -> None:
    runs_folder().chmod(0o755)
    with pytest.raises(StartError, match=r"chmod 700 .*, or set TMPDIR"):
        RunFolder.create()


def test_a_temporary_folder_too_deep_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StartError, match="set TMPDIR to a folder whose path is shorter"):
        RunFolder.create()
    assert list(runs_folder().iterdir()) == []


def test_a_run_has_ended_once_its_command_has() -> None:
    run, other = RunFolder.create(), RunFolder.create()
    with ended_runs() as ended:
        assert ended == []
    run.release()
    with ended_runs() as ended:
        assert [one.path for one in ended] == [run.path]
    other.release()


@pytest.mark.parametrize("mode", ["disabled", "k8s"])
def test_the_users_own_settings_of_rays_token_do_not_count(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    users = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "x", "RAY_AUTH_TOKEN_PATH": "/x"}
    monkeypatch.setattr(os, "environ", {**os.environ, **users})
    run = RunFolder.create()
    set_environment(run)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(run.token)
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert os.environ["LOOMSERVE_RUN"] == str(run.path)

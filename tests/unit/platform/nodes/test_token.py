"""The cluster's token: made by the head, read by all, and by nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.nodes.token import read_or_make_token, read_token, token_path


def test_the_head_makes_it_once_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "made" / "token"
        token = read_or_make_token(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_or_make_token(path) == read_token(path) == token
    assert len(token) >= 64


def test_others_are_told_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="copy the file from the head"):
        read_token(tmp_path / "none")


def test_one_that_others_read_or_guess_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 64)
    path.chmod(0o640)
    with pytest.raises(StartError, match=f"chmod 600 {path}"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(StartError, match="shorter than 32"):
        read_or_make_token(path)


def test_it_lies_in_the_cache_folder_unless_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))
    assert token_path(None) == tmp_path / "cluster-token"
    assert token_path(Path("~/token")) == Path.home() / "token"

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from loomserve.platform.base.files import replace_private, stamp


def test_a_file_is_replaced_whole_and_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("former")
    path.chmod(0o644)
    with path.open() as reader:
        replace_private(path, "new")
        assert reader.read() == "former"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("former")
    (tmp_path / "link").symlink_to("file")
    replace_private(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_what_cannot_be_written_leaves_the_former_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_text("former")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_private(path, "new")
    assert path.read_text() == "former"
    assert os.listdir(tmp_path) == ["file"]


def test_a_stamp_tells_changes_and_absence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert stamp(path) is None
    path.write_text("a")
    first = stamp(path)
    assert first == stamp(path)
    replace_private(path, "b")
    assert stamp(path) not in (None, first)

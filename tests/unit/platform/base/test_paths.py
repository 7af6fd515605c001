"""Folders of users' data are their user's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import check_private


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o740, 0o755, 0o777])
def test_a_folder_that_others_get_into_is_refused_with_what_to_do(
    tmp_path: Path, mode: int
) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StartError, match=rf"chmod 700 {tmp_path}, or set a\.field"):
        check_private(tmp_path, "a.field")
    tmp_path.chmod(0o700)
    check_private(tmp_path, "a.field")


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(StartError, match=r"another user \(uid 12345\): chown 0 "):
        check_private(tmp_path, "a.field")

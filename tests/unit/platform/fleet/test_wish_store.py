"""What operators wish, kept by one controller at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from loomserve.platform.base.errors import TakenOver
from loomserve.platform.fleet.wishes import Wishes, WishStore

DRAINED = Wishes(drained_nodes=("two",))


def test_a_controller_that_was_cut_off_saves_nothing_late(tmp_path: Path) -> None:
    old = WishStore(tmp_path, "run")
    old.save(Wishes())
    new = WishStore(tmp_path, "run")
    assert new.generation == old.generation + 1
    new.save(DRAINED)
    for late in (Wishes(), DRAINED):
        with pytest.raises(TakenOver):
            old.save(late)
    new.save(DRAINED)
    third = WishStore(tmp_path, "run")
    assert third.wishes == DRAINED
    for store in (old, new, third):
        store.close()


def test_another_run_begins_without_wishes_but_not_with_the_first_generation(
    tmp_path: Path,
) -> None:
    one = WishStore(tmp_path, "token-1")
    one.save(DRAINED)
    two = WishStore(tmp_path, "token-2")
    assert two.wishes is None
    assert two.generation > one.generation
    two.save(Wishes())
    again = WishStore(tmp_path, "token-2")
    assert again.wishes == Wishes()
    assert b"token-" not in (tmp_path / "wishes.sqlite-wal").read_bytes(), "the token is in no file"
    for store in (one, two, again):
        store.close()

"""What namespaces mean is known to the next store, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from loomserve.kvstore.index.eviction import lru
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.server.spaces import Spaces
from loomserve.kvstore.storage.checksum import PAGE, BlockLayout, Space

ONE, OTHER = b"1" * 16, b"2" * 16
SMALL, LARGE = BlockLayout(2, 3000), BlockLayout(3, 4000)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "spaces.json"


def spaces_in(file: Path) -> Spaces:
    return Spaces(file, Index(lru), 16 * PAGE)


def test_the_next_store_knows_what_was_declared(file: Path) -> None:
    spaces = spaces_in(file)
    assert spaces.declare(ONE, Space("a", SMALL)) is None
    assert spaces.declare(OTHER, Space("a", LARGE)) is None
    successor = spaces_in(file)
    assert ONE not in successor
    successor.load()
    assert dict(successor.items()) == {ONE: Space("a", SMALL), OTHER: Space("a", LARGE)}
    assert successor.of_model("a") == {ONE, OTHER}
    assert successor.of_slot_bytes(LARGE.slot_bytes) == {OTHER}


def test_a_namespace_keeps_its_layout_whatever_model_declares_it(file: Path) -> None:
    spaces = spaces_in(file)
    spaces.declare(ONE, Space("a", SMALL))
    assert spaces.declare(ONE, Space("b", SMALL)) is None
    assert "another shape" in (spaces.declare(ONE, Space("a", LARGE)) or "")
    assert spaces[ONE] == Space("a", SMALL)


def test_a_block_larger_than_an_extent_is_refused_with_what_to_do(file: Path) -> None:
    spaces = spaces_in(file)
    problem = spaces.declare(ONE, Space("a", BlockLayout(21, 3000)))
    assert "give the store more memory" in (problem or "")
    assert ONE not in spaces
    assert not file.exists()

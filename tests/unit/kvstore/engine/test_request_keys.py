"""Keys of partly filled blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.kvstore.engine.request_keys import tail_key
from loomserve.kvstore.index.radix import KEY_BYTES

chains = st.integers(1, 3).flatmap(
    lambda blocks: st.binary(min_size=blocks * KEY_BYTES, max_size=blocks * KEY_BYTES)
)
tokens = st.lists(st.integers(0, 2**20), min_size=1, max_size=40)


@given(chains, tokens, chains, tokens)
def test_a_tail_is_known_by_the_block_before_it_and_its_tokens(
    chain: bytes, said: list[int], other_chain: bytes, other_said: list[int]
) -> None:
    key = tail_key(chain, said)
    assert len(key) == KEY_BYTES
    same = chain[-KEY_BYTES:] == other_chain[-KEY_BYTES:] and said == other_said
    assert (key == tail_key(other_chain, other_said)) == same


def test_a_tail_without_a_block_before_it_has_no_key() -> None:
    with pytest.raises(ValueError, match="at least one full block"):
        tail_key(b"", [1])

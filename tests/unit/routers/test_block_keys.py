"""Keys of blocks: equal as far as prompts are, and within one model and tenant only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.routers.prefix_index import MOST_BLOCKS, token_keys

BLOCK = 4
TOKENS = st.lists(st.integers(0, 2), max_size=30)


def keys(tokens: list[int], model: str = "m", salt: str | None = None) -> tuple[int, ...]:
    return token_keys(tokens, model=model, salt=salt, block_tokens=BLOCK)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return len(set(one) & set(other))


@given(TOKENS, TOKENS)
def test_prompts_share_the_keys_of_the_full_blocks_at_their_common_beginning(
    one: list[int], other: list[int]
) -> None:
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    first, second = keys(one), keys(other)
    assert (len(first), len(second)) == (len(one) // BLOCK, len(other) // BLOCK)
    assert common(first, second) == alike // BLOCK
    assert first[: alike // BLOCK] == second[: alike // BLOCK]


@given(TOKENS.filter(lambda tokens: len(tokens) >= BLOCK), st.none() | st.text(), st.text())
def test_another_salt_or_model_shares_nothing(
    tokens: list[int], salt: str | None, name: str
) -> None:
    mine = keys(tokens, "m", salt)
    assert common(mine, keys(tokens, "m", name)) == (len(mine) if name == salt else 0)
    assert common(mine, keys(tokens, "m" + name, salt)) == (0 if name else len(mine))
    assert common(keys(tokens, "m", name), keys(tokens, name, "m")) == (
        len(mine) if name == "m" else 0
    )


@given(TOKENS.filter(lambda tokens: len(tokens) >= BLOCK), st.none() | st.text(), st.text())
def test_another_adapter_shares_nothing(tokens: list[int], adapter: str | None, other: str) -> None:
    mine, theirs = (
        token_keys(tokens, model="m", salt=None, adapter=each, block_tokens=BLOCK)
        for each in (adapter, other)
    )
    assert common(mine, theirs) == (len(mine) if adapter == other else 0)
    assert not common(theirs, keys(tokens)), "nor the model itself"
    assert not common(theirs, keys(tokens, salt=other)), "nor a tenant of that name"


def test_no_salt_is_none_of_the_texts_that_a_salt_may_be() -> None:
    assert not common(keys([1] * 8), keys([1] * 8, salt="None"))
    assert not common(keys([1] * 8), keys([1] * 8, salt=""))


def test_blocks_of_another_size_share_nothing() -> None:
    tokens = [7] * 64
    small, large = (token_keys(tokens, model="m", salt=None, block_tokens=n) for n in (8, 16))
    assert not common(small, large)


def test_of_an_endless_prompt_the_beginning_has_keys() -> None:
    found = token_keys([0] * 1000 * MOST_BLOCKS, model="m", salt=None, block_tokens=10)
    assert len(found) == MOST_BLOCKS
    assert len(set(found)) == MOST_BLOCKS


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        keys([token] * BLOCK)

"""Keys of a prompt's blocks, by which prompts that begin alike are told.

A key is the hash of its block and of the key before it, so two prompts have a key in common only if
they are the same up to the end of its block. The first is hashed with the model, its adapter and
the tenant's cache salt: an engine shares KV blocks within these only, and so do keys.

They are Python's hashes, of 64 bits, in a third of the time that a cryptographic hash takes.
They hold within the process. Should two differing blocks have the same, a prompt goes to a replica
that has less of it than was thought, and computes it there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

BLOCK_TOKENS = 64
"""Several of vLLM's blocks (16 tokens): less to hash, and shorter prefixes save nothing."""
MOST_BLOCKS = 2048
"""A prompt's blocks beyond have no keys."""

_TOKEN_TYPE = "I"


def token_keys(
    tokens: Iterable[int],
    *,
    model: str,
    salt: str | None,
    adapter: str | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> tuple[int, ...]:
    """A key for each full block of a prompt's tokens, the last token's block only if it is full.

    Raises:
        OverflowError: a token is below 0, or above 2³² - 1.
    """
    packed = array(_TOKEN_TYPE, tokens)
    size = block_tokens * packed.itemsize
    return _chain(packed.tobytes(), size, ("tokens", block_tokens, model, adapter, salt))


def _chain(blocks: bytes, size: int, root: tuple[str | int | None, ...]) -> tuple[int, ...]:
    key = hash(root)
    keys = []
    for start in range(0, min(len(blocks), MOST_BLOCKS * size) - size + 1, size):
        key = hash((key, blocks[start : start + size]))
        keys.append(key)
    return tuple(keys)

"""Keys of a prompt's blocks, by which prompts that begin alike are told.

A key is the hash of its block and of the key before it, so two prompts have a key in common only if
they are the same up to the end of its block. The first is hashed with the model, its adapter and
the tenant's cache salt: an engine shares KV blocks within these only, and so do keys.

They are hashes of 64 bits by xxh3, which tells at each block's end what it is of all so far. Only
the process that routes has them. Should two differing blocks have the same, a prompt goes to a
replica that has less of it than was thought, and computes it there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from xxhash import xxh3_64

BLOCK_TOKENS = 64
"""Several of vLLM's blocks (16 tokens): less to hash, and shorter prefixes save nothing."""
MOST_BLOCKS = 2048
"""A prompt's blocks beyond have no keys."""


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
    packed = array("I", tokens)
    size = block_tokens * packed.itemsize
    blocks = memoryview(packed).cast("B")
    hashed = xxh3_64(repr((block_tokens, model, adapter, salt)).encode())
    keys = []
    for start in range(0, min(len(blocks), MOST_BLOCKS * size) - size + 1, size):
        hashed.update(blocks[start : start + size])
        keys.append(hashed.intdigest())
    return tuple(keys)

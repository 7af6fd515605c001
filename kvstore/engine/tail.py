"""The key of a sequence's last block where the sequence fills it in part only.

vLLM hashes full blocks. What one engine hands over to another, or a preempted request leaves, is
kept to its last token all the same, under a key that follows the chain's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from loomserve.kvstore.index.radix import KEY_BYTES


def tail_key(chain: bytes, tokens: Sequence[int], owner: str = "") -> bytes:
    """The key of a block that holds ``tokens`` and then nothing, after the blocks of ``chain``.

    The chain's last key stands for all tokens before, and for the cache salt and the adapter. With
    an ``owner``, a request, nobody else finds the block.

    Raises:
        ValueError: there is neither a block before nor an owner.
    """
    if len(chain) < KEY_BYTES and not owner:
        raise ValueError("a tail follows at least one full block")
    said = b"tail" + chain[-KEY_BYTES:] + array("q", tokens).tobytes() + owner.encode()
    return hashlib.sha256(said).digest()[:KEY_BYTES]

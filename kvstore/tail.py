"""The key of a prompt's last block where the prompt fills it in part only.

vLLM hashes full blocks. A prompt that one engine computes for another is handed over to its last
token all the same, under a key that follows the chain's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from loomserve.kvstore.radix import KEY_BYTES


def tail_key(chain: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that holds ``tokens`` and then nothing, after the blocks of ``chain``.

    The chain's last key stands for all tokens before, and for the cache salt and the adapter.

    Raises:
        ValueError: there is no block before.
    """
    if len(chain) < KEY_BYTES:
        raise ValueError("a tail follows at least one full block")
    said = b"tail" + chain[-KEY_BYTES:] + array("q", tokens).tobytes()
    return hashlib.sha256(said).digest()[:KEY_BYTES]

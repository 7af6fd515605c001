"""Keys of a request's blocks in the store, and what its ``kv_transfer_params`` ask for.

vLLM hashes full blocks. The last block of what one engine hands over to another, or a preempted
request leaves, is kept to its last token all the same, under a key that follows the chain's, and
that of a request that is being answered is kept as it fills.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.protocol import HANDED_OVER, HANDED_OVER_BY, HANDS_OVER

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PARTS_OF_A_BLOCK = 4


def hands_over(request: Request) -> bool:
    """Whether another engine goes on after this request's prompt."""
    return HANDS_OVER in (request.kv_transfer_params or {})


def handed_over_tokens(request: Request) -> int:
    """Tokens that another engine has just computed for this request."""
    tokens: int = (request.kv_transfer_params or {}).get(HANDED_OVER, 0)
    return tokens


def handed_over_by(request: Request) -> str:
    """The node whose store has those tokens' KV; empty: not said."""
    node: str = (request.kv_transfer_params or {}).get(HANDED_OVER_BY, "")
    return node


def tail_end(tokens: int, block_size: int) -> int:
    """Tokens up to which the KV of a request that is being answered is kept in the store. Of the
    block that its first ``tokens`` leave unfilled, every fourth part is saved once it is computed:
    who goes on with the request computes less than that again."""
    part = max(1, block_size // _PARTS_OF_A_BLOCK)
    return tokens // part * part


def next_tail(saved: int, block_size: int) -> int:
    """The least number of tokens whose :func:`tail_end` is beyond ``saved``."""
    part = max(1, block_size // _PARTS_OF_A_BLOCK)
    return tail_end(saved, block_size) + part


def chain_of(request: Request, blocks: int) -> bytes:
    """Keys of the request's first ``blocks`` full blocks."""
    return b"".join(block_hash[:KEY_BYTES] for block_hash in request.block_hashes[:blocks])


def tail_key(chain: bytes, tokens: Sequence[int], owner: str = "") -> bytes:
    """The key of a block that holds ``tokens`` and then nothing, after the blocks of ``chain``. The
    chain's last key stands for all tokens before, the cache salt and the adapter. With an
    ``owner``, a request, nobody else finds the block. ``ValueError``: there is neither."""
    if len(chain) < KEY_BYTES and not owner:
        raise ValueError("a tail follows at least one full block")
    said = b"tail" + chain[-KEY_BYTES:] + array("q", tokens).tobytes() + owner.encode()
    return hashlib.sha256(said).digest()[:KEY_BYTES]


def tail_key_of(request: Request, chain: bytes, end: int, block_size: int, *, owned: bool) -> bytes:
    """Key of the block that follows ``chain`` and is filled up to token ``end``. Where it is
    ``owned``, no other request finds the block."""
    tokens = request.all_token_ids[len(chain) // KEY_BYTES * block_size : end]
    return tail_key(chain, tokens, request.request_id if owned else "")


def keys_of(request: Request, tokens: int, left: int, block_size: int, *, owned: bool) -> bytes:
    """Keys of the blocks that hold the request's first ``tokens``. ``left`` are the tokens to the
    last of which its KV was left in the store, by the request itself if they are ``owned``."""
    full, rest = divmod(tokens, block_size)
    chain = chain_of(request, full)
    if not rest:
        return chain
    if left - full * block_size >= block_size:
        # A full one, of which the last token is computed again.
        return chain_of(request, full + 1)
    return chain + tail_key_of(request, chain, left, block_size, owned=owned)

"""The shape of a borrower's attention, by which a lender keeps its KV and computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec

GPU = "gpu"
"""Value of ``Geometry.isa``: a token's key and value lie side by side, as on GPUs."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Geometry:
    """Shape, type and arithmetic of one model's attention, alike in all its layers. Activations and
    KV have the same ``dtype``. ``isa`` is the variant of vLLM's CPU attention kernel that packs a
    block's interior ("vec", "vec16", "amx", "neon", …), or :data:`GPU`. A ``sliding_window`` of -1
    tokens is none, as is a ``softcap`` of 0. ``ValueError`` if no attention has this geometry."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    scale: float
    isa: str
    sliding_window: int = -1
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KV of {self.dtype} cannot be lent; {', '.join(ITEM_BYTES)} can")
        counts = (self.layers, self.query_heads, self.kv_heads, self.head_size, self.block_size)
        if min(counts) < 1 or self.query_heads % self.kv_heads:
            raise ValueError(f"no attention has this geometry: {self}")

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values together."""
        elements = 2 * self.kv_heads * self.block_size * self.head_size
        return elements * ITEM_BYTES[self.dtype]

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what :meth:`to_json` wrote; ``ValueError`` if it is none."""
        return msgspec.json.decode(text, type=cls)

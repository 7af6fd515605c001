"""Seals a block's layers as an engine's saver does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loomserve.kvstore.storage.checksum import BlockLayout, layer_digest


def seal_layer(layout: BlockLayout, view: NDArray[np.uint8], layer: int, block_seed: int) -> None:
    """Store the checksum of the layer's bytes as they are now."""
    layout.checksums(view)[layer] = layer_digest(layout.pieces(view)[layer].data, layer, block_seed)


def is_whole(layout: BlockLayout, view: NDArray[np.uint8], layer: int, block_seed: int) -> bool:
    """Whether a layer's bytes match their checksum."""
    digest = layer_digest(layout.pieces(view)[layer].data, layer, block_seed)
    return bool(layout.checksums(view)[layer] == digest)

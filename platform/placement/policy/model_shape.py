"""A model's layers and their sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Parameters, not bytes: in what format they are computed is the device's matter."""

    layers: int
    hidden_size: int
    layer_parameters: float
    """Of a layer, on average."""
    embedding_parameters: int
    head_parameters: int
    """The embeddings' again where the two are tied, as the last stage needs its own copy."""

"""Shape of a model: its layers and their sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Layers of a model and numbers of parameters; their bytes depend on the device."""

    layers: int
    hidden_size: int
    layer_parameters: float
    """Average of the layers."""
    embedding_parameters: int
    head_parameters: int
    """Those of the embeddings if the two are tied, as the last stage needs its own copy."""

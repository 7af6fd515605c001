"""Tensors that lie one behind the other in flat memory, which both ends of a loan map."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

Fields = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor, by name, in the order in which they lie."""


def nbytes_of(fields: Fields, aligned: int) -> int:
    """Bytes of all, each of which begins at a multiple of ``aligned`` bytes."""
    return sum(_padded(*field, aligned) for field in fields.values())


def views(fields: Fields, memory: torch.Tensor, aligned: int) -> dict[str, torch.Tensor]:
    """Return the tensors over ``memory``, uint8 of :func:`nbytes_of` bytes."""
    found, first = {}, 0
    for name, (dtype, shape) in fields.items():
        found[name] = memory[first : first + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        first += _padded(dtype, shape, aligned)
    return found


def _padded(dtype: torch.dtype, shape: tuple[int, ...], aligned: int) -> int:
    nbytes: int = prod(shape) * dtype.itemsize
    return -(-nbytes // aligned) * aligned

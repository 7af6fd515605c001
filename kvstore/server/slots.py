"""Encoding of slot numbers in messages: little-endian int64."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

_WIRE = np.dtype("<i8")


def encode_slots(slots: Sequence[int] | array[int]) -> bytes:
    return np.asarray(slots, _WIRE).tobytes()


def decode_slots(data: bytes) -> list[int]:
    slots: list[int] = np.frombuffer(data, _WIRE).tolist()
    return slots

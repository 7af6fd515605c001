"""Slot numbers on the wire: little-endian int64."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_WIRE = np.dtype("<i8")


def encode_slots(slots: Iterable[int]) -> bytes:
    return np.fromiter(slots, _WIRE).tobytes()


def decode_slots(data: bytes) -> list[int]:
    slots: list[int] = np.frombuffer(data, _WIRE).tolist()
    return slots

"""Refuses numbers that nothing between a client and an engine can carry."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from loomserve.platform.base.errors import BadRequest

_LEAST, _MOST = -(2**63), 2**63 - 1


def check_numbers(fields: Mapping[str, Any], but: Container[str] = ()) -> None:
    """Check a request's fields, and what is directly in them, apart from those named in ``but``.

    Raises:
        BadRequest: a number is beyond 64 bits, with which vLLM fails.
    """
    for name, value in fields.items():
        # vLLM makes whole numbers of some fractions.
        if isinstance(value, int | float):
            if value < _LEAST or value > _MOST:
                raise _too_large(name)
        elif name not in but and isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            if any(type(one) is int and not _LEAST <= one <= _MOST for one in inner):
                raise _too_large(name)


def _too_large(name: str) -> BadRequest:
    return BadRequest(f"{name} has a number beyond 64 bits; give a smaller one", param=name)

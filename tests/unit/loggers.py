"""Loggers of a gateway, which takes them over in its process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = ("ray.serve", "loomserve", "opentelemetry")


@contextmanager
def loggers_as_they_were() -> Iterator[None]:
    """What is changed of them within is undone, so that tests that come later see what is said."""
    loggers = [logging.getLogger(name) for name in _NAMES]
    kept = [(each, each.handlers[:], each.propagate, each.level) for each in loggers]
    try:
        yield
    finally:
        for each, handlers, propagate, level in kept:
            each.handlers[:], each.propagate = handlers, propagate
            each.setLevel(level)

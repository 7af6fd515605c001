"""A request's deadline: when its client wants to have the whole answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DEADLINE = "loomserve_deadline"
"""Key of the deadline in vLLM's ``vllm_xargs`` and ``SamplingParams.extra_args``.

It is Unix time in seconds, for it crosses processes."""


def deadline_of(extra_args: Mapping[str, Any] | None) -> float | None:
    """The deadline among a request's ``extra_args``; None if there is none, or no finite number."""
    deadline = (extra_args or {}).get(DEADLINE)
    if not isinstance(deadline, int | float) or isinstance(deadline, bool):
        return None
    try:
        return float(deadline) if math.isfinite(deadline) else None
    except OverflowError:  # an integer beyond all floats
        return None

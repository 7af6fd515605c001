"""A request's deadline: when its client wants to have the whole answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DEADLINE = "loomserve_deadline"
"""Key of the deadline in vLLM's ``vllm_xargs`` and ``SamplingParams.extra_args``.

It is in seconds of CLOCK_MONOTONIC, which is one for all processes of a machine and takes no steps.
"""


def deadline_of(extra_args: Mapping[str, Any] | None) -> float | None:
    """The deadline among a request's ``extra_args``; None if there is none, or no finite number."""
    deadline = (extra_args or {}).get(DEADLINE)
    if not isinstance(deadline, int | float) or isinstance(deadline, bool):
        return None
    try:
        return float(deadline) if math.isfinite(deadline) else None
    except OverflowError:  # an integer beyond all floats
        return None

"""A request's deadline: when its client wants to have the whole answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DEADLINE = "loomserve_deadline"
"""Key of the deadline in vLLM's ``vllm_xargs`` and ``SamplingParams.extra_args``.

It is in monotonic seconds of the machine that has the request, a clock that takes no steps; on its
way to an engine a request has the seconds that are left.
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

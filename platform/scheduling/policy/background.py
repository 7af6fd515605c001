"""The mark of background requests, which run only beside others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BACKGROUND = "loomserve_background"
"""Key of the mark, whose value is 1, in ``vllm_xargs`` and ``SamplingParams.extra_args``."""


def is_background(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request with these ``extra_args`` comes after every other."""
    return (extra_args or {}).get(BACKGROUND) == 1

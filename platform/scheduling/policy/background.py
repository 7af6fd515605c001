"""Requests that run only beside others: how the engine's scheduler knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BACKGROUND = "loomserve_background"
"""Where a request says so, in vLLM's ``vllm_xargs`` and ``SamplingParams.extra_args``, as 1."""


def is_background(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request with these ``extra_args`` comes after every other."""
    return (extra_args or {}).get(BACKGROUND) == 1

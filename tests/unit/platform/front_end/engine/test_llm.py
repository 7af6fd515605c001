"""What the constructor repeats of vLLM's is all that vLLM's assigns."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from loomserve.platform.front_end.engine.llm import FrontEndLLM


def assigned(constructor: Any) -> set[str]:
    """Attributes that it sets on ``self``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(constructor)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


# What vLLM 0.32 assigns and 0.29 does not.
LATER = {
    "_frontend_profiler_injected",
    "_frontend_profiler_worker_name",
    "_profile_lock",
    "_profile_session_active",
    "_profile_session_guard_enabled",
    "admission_stats",
}


def test_every_attribute_that_vllm_sets_is_set() -> None:
    ours = assigned(FrontEndLLM.__init__)
    assert assigned(AsyncLLM.__init__) <= ours
    assert ours - assigned(AsyncLLM.__init__) - LATER == {"statistics", "_grammars"}

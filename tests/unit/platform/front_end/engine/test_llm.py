"""What the constructor repeats of vLLM's is all that vLLM's assigns; what requests are added as."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from typing import Any

import pytest
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


def test_every_attribute_that_vllm_sets_is_set() -> None:
    ours = assigned(FrontEndLLM.__init__)
    assert assigned(AsyncLLM.__init__) <= ours
    assert ours - assigned(AsyncLLM.__init__) == {
        "statistics",
        "_grammars",
        "_is_simulated",
    }


@pytest.mark.parametrize(
    ("request_id", "told"), [("cmpl-1-0", True), ("chatcmpl-1", None), ("resp_1", None)]
)
def test_a_completion_is_held_to_its_grammar_though_its_model_reasons(
    monkeypatch: pytest.MonkeyPatch, request_id: str, told: bool | None
) -> None:
    added: list[dict[str, Any]] = []

    async def add(*_: Any, **how: Any) -> None:
        added.append(how)

    monkeypatch.setattr(AsyncLLM, "add_request", add)
    llm = object.__new__(FrontEndLLM)
    llm._is_simulated = False
    asyncio.run(llm.add_request(request_id, "Once", None, reasoning_ended=None))
    assert [each["reasoning_ended"] for each in added] == [told]

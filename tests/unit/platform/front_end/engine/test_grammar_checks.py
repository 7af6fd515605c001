"""Grammars are checked in threads, once, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.generate.base import protocol
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from loomserve.platform.front_end.engine import grammar_checks
from loomserve.platform.front_end.engine.grammar_checks import GrammarChecks, compiled
from loomserve.platform.front_end.engine.llm import FrontEndLLM
from tests.waiting import PATIENCE_S

TASKS: Any = ("generate",)
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}})


@pytest.fixture(autouse=True)
def _vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = protocol.validate_structural_tag_payload
    monkeypatch.setattr(protocol, "validate_structural_tag_payload", stock)


def asking(**outputs: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**outputs))


class Processor:
    """vLLM's input processor, whose check of parameters waits until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.checked: list[Any] = []

    def _validate_params(self, params: Any, supported_tasks: Any) -> int:
        assert self.may_go_on.wait(PATIENCE_S), "the event loop stood still"
        if isinstance(params, SamplingParams):
            validate_xgrammar_grammar(params)
        self.checked.append(params)
        return len(self.checked)


def test_the_loop_goes_on_while_a_grammar_is_checked_and_checks_nothing_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = Processor()
    added: list[tuple[str, int]] = []

    async def add(self: Any, request_id: str, prompt: Any, params: Any, **rest: Any) -> str:
        added.append((request_id, self.input_processor._validate_params(params, TASKS)))
        return request_id

    async def tasks(self: Any) -> Any:
        return TASKS

    async def ask() -> None:
        llm: Any = object.__new__(FrontEndLLM)
        llm._is_simulated = False
        llm.input_processor = processor
        llm._grammars = GrammarChecks(processor)  # type: ignore[arg-type]
        slow = asyncio.create_task(llm.add_request("1", {}, asking(json={"type": "array"})))
        await asyncio.sleep(0.05)
        assert not slow.done()
        processor.may_go_on.set()
        assert await slow == "1"
        assert len(processor.checked) == 1
        # One without a grammar is checked where vLLM does so, as are others' parameters.
        await llm.add_request("2", {}, SamplingParams())
        await llm.add_request("3", {}, asking(json={"type": "array"}))
        assert len(processor.checked) == 3
        with pytest.raises(VLLMValidationError):
            await llm.add_request("4", {}, asking(json={"type": "nothing"}))

    monkeypatch.setattr(AsyncLLM, "add_request", add)
    monkeypatch.setattr(AsyncLLM, "get_supported_tasks", tasks)
    monkeypatch.setattr(AsyncLLM, "__del__", lambda self: None, raising=False)
    asyncio.run(ask())
    assert added == [("1", 1), ("2", 2), ("3", 3)], "with what vLLM's check has returned"


def test_a_check_has_a_limit_of_time() -> None:
    processor: Any = Processor()
    checks = GrammarChecks(processor, limit_s=0.05)
    with pytest.raises(VLLMValidationError, match="Simplify"):
        asyncio.run(checks.check(asking(regex="a"), TASKS))
    processor.may_go_on.set()


@pytest.fixture
def stock_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own check of tags, whatever front ends this process has had."""
    if protocol.validate_structural_tag_payload is grammar_checks._check_tag_is_json:
        own = GrammarChecks._check_tag
        monkeypatch.setattr(protocol, "validate_structural_tag_payload", own)


@pytest.mark.usefixtures("stock_check")
def test_a_structural_tag_is_compiled_in_the_thread_and_not_while_a_request_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    stock = protocol.validate_structural_tag_payload

    def compile_tag(payload: str, *, parameter: str) -> None:
        compiled.append(threading.current_thread().name)
        stock(payload, parameter=parameter)

    monkeypatch.setattr(protocol, "validate_structural_tag_payload", compile_tag)
    processor: Any = SimpleNamespace(_validate_params=lambda params, supported_tasks: None)
    checks = GrammarChecks(processor)
    protocol.validate_structural_tag_response_format(json.loads(TAG))
    protocol.validate_structured_outputs_structural_tag({"structural_tag": TAG})
    assert compiled == []
    asyncio.run(checks.check(asking(structural_tag=TAG), TASKS))
    assert [name.split("_")[0] for name in compiled] == ["grammars"]
    with pytest.raises(VLLMValidationError):
        asyncio.run(checks.check(asking(structural_tag='{"type": "structural_tag"}'), TASKS))


@pytest.mark.usefixtures("stock_check")
def test_a_second_front_end_of_a_process_compiles_tags_as_the_first_does() -> None:
    processor: Any = SimpleNamespace(_validate_params=lambda params, supported_tasks: None)
    wrong = asking(structural_tag='{"type": "structural_tag"}')
    for checks in [GrammarChecks(processor), GrammarChecks(processor)]:
        with pytest.raises(VLLMValidationError):
            asyncio.run(checks.check(wrong, TASKS))


def test_a_grammar_that_was_found_good_is_checked_once_and_other_parameters_each_time() -> None:
    checked: list[Any] = []

    def check(params: SamplingParams, supported_tasks: Any) -> None:
        checked.append(params.structured_outputs)
        if params.max_tokens == 7:
            raise VLLMValidationError("seven")
        if params.structured_outputs is not None:
            validate_xgrammar_grammar(params)

    processor: Any = SimpleNamespace(_validate_params=check)
    checks = GrammarChecks(processor)
    first, second, wrong = (asking(choice=["a", "b"]) for _ in range(3))
    asyncio.run(checks.check(first, TASKS))
    asyncio.run(checks.check(second, TASKS))
    assert [outputs is None for outputs in checked] == [False, True]
    # vLLM writes what it has made of the choices into the parameters.
    assert second.structured_outputs == first.structured_outputs
    assert second.structured_outputs is not first.structured_outputs
    assert second.structured_outputs.grammar
    wrong.max_tokens = 7
    with pytest.raises(VLLMValidationError, match="seven"):
        asyncio.run(checks.check(wrong, TASKS))
    for _ in range(2):
        with pytest.raises(VLLMValidationError):
            asyncio.run(checks.check(asking(json={"type": "nothing"}), TASKS))
    assert [outputs is None for outputs in checked][3:] == [False, False]


@pytest.mark.parametrize("payload", ["", "{", "[]", 7, "[" * 100_000])
def test_what_is_no_structural_tag_at_all_is_refused_at_once(payload: Any) -> None:
    GrammarChecks(SimpleNamespace(_validate_params=None))  # type: ignore[arg-type]
    with pytest.raises(VLLMValidationError):
        protocol.validate_structured_outputs_structural_tag({"structural_tag": payload})


def test_what_the_engine_cannot_compile_is_the_requests_fault() -> None:
    closed = []

    async def outputs(*reasons: str | None) -> AsyncGenerator[Any, None]:
        try:
            for reason in reasons:
                yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)])
        finally:
            closed.append(True)

    async def seen(*reasons: str | None) -> list[Any]:
        return [each async for each in compiled(outputs(*reasons))]

    assert len(asyncio.run(seen(None, None, "stop"))) == 3
    with pytest.raises(VLLMValidationError, match="compile"):
        asyncio.run(seen(None, "error"))
    assert closed == [True, True]

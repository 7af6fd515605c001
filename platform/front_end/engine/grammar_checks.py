"""Checks of grammars in threads, so that vLLM's checks do not block the event loop.

To see whether a JSON schema, regular expression or grammar can be compiled, vLLM converts it in
native code, for up to seconds, on the event loop of all streams. Here threads do that before vLLM
takes the request, which then counts as checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import asdict
from typing import Any, ClassVar

from vllm.entrypoints.generate.base import protocol
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

_THREADS = 2
# With what the gateway lets through, a check takes seconds at most; others may be before it.
_LIMIT_S = 30.0
_REMEMBERED = 64


class GrammarChecks:
    """Checks request parameters in threads, each within a time limit. Good grammars are remembered
    for a while: a request may have one grammar for many prompts, and clients repeat them."""

    # vLLM's own, which the first front end of this process has put another in the place of.
    _check_tag: ClassVar[Callable[..., None]]

    def __init__(self, processor: InputProcessor, *, limit_s: float = _LIMIT_S) -> None:
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        # By the identity of parameters, what vLLM's check of them returned: whether their answer
        # gets a watermark.
        self._checked: dict[int, Any] = {}
        # As vLLM's check left them, for it writes into them.
        self._good: OrderedDict[bytes, StructuredOutputsParams] = OrderedDict()
        self._check_params = processor._validate_params
        processor._validate_params = self._check_once
        # vLLM calls it while it parses a request, which is on the event loop, too.
        if protocol.validate_structural_tag_payload is not _check_tag_is_json:
            GrammarChecks._check_tag = staticmethod(protocol.validate_structural_tag_payload)
            protocol.validate_structural_tag_payload = _check_tag_is_json

    async def check(self, params: SamplingParams, tasks: tuple[str, ...]) -> Any:
        """What vLLM's check returns; raises VLLMValidationError for a wrong or too slow grammar."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limit_s):
                return await loop.run_in_executor(self._threads, self._check, params, tasks)
        except TimeoutError:
            raise VLLMValidationError(
                f"The grammar was not compiled after {self._limit_s:g} s. Simplify the schema or "
                "the expression, or try again when fewer requests have one."
            ) from None

    @contextmanager
    def known(self, params: SamplingParams, checked: Any) -> Iterator[None]:
        """Within the block vLLM's check of these parameters returns ``checked`` at once."""
        self._checked[id(params)] = checked
        try:
            yield
        finally:
            self._checked.pop(id(params), None)

    def _check(self, params: SamplingParams, tasks: tuple[str, ...]) -> Any:
        grammar = params.structured_outputs
        digest = _digest(grammar)
        good = self._good.get(digest)
        if good is not None:
            params.structured_outputs = None
            checked = self._check_params(params, tasks)
            params.structured_outputs = copy(good)
            return checked
        if grammar.structural_tag is not None:
            # Another backend would take a tag that vLLM's parser of requests refuses.
            self._check_tag(grammar.structural_tag, parameter="structured_outputs")
        checked = self._check_params(params, tasks)
        self._good[digest] = copy(params.structured_outputs)
        while len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)
        return checked

    def _check_once(self, params: Any, supported_tasks: tuple[str, ...]) -> Any:
        if id(params) in self._checked:
            return self._checked[id(params)]
        return self._check_params(params, supported_tasks)


async def compiled(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of a request with a grammar; raises VLLMValidationError if the engine ended it
    with an error: only the engine finds out whether a valid grammar can be compiled."""
    async with aclosing(outputs):
        async for output in outputs:
            if any(one.finish_reason == "error" for one in output.outputs):
                raise VLLMValidationError(
                    "The engine could not compile the grammar, or could not follow it. Simplify "
                    "the schema or the expression."
                )
            yield output


def _digest(grammar: StructuredOutputsParams) -> bytes:
    return hashlib.blake2b(json.dumps(asdict(grammar)).encode()).digest()


def _check_tag_is_json(payload: Any, *, parameter: str) -> None:
    """In the place of vLLM's own check, which compiles the tag."""
    try:
        is_object = isinstance(json.loads(payload), dict)
    except (TypeError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise VLLMValidationError(
            f"Invalid {parameter} structural_tag specification.", parameter=parameter
        )

"""What a request asks for is read as vLLM's own request classes read it, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import (
    EmbeddingBatchChatInputRequest,
    EmbeddingChatInputRequest,
    EmbeddingCompletionRequest,
)
from vllm.exceptions import VLLMValidationError

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.policy.fields import (
    BOOLEANS,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    INTEGERS,
    MESSAGES,
    PASSED_ON,
    PLATFORMS_OWN,
    RESPONSES,
    WITHOUT_EFFECT,
)
from loomserve.platform.requests.policy.refused_fields import REFUSED
from loomserve.platform.requests.policy.sequences import longest

CLASSES: dict[str, tuple[type[BaseModel], ...]] = {
    CHAT: (ChatCompletionRequest,),
    COMPLETIONS: (CompletionRequest,),
    RESPONSES: (ResponsesRequest,),
    MESSAGES: (AnthropicMessagesRequest,),
    EMBEDDINGS: (
        EmbeddingCompletionRequest,
        EmbeddingChatInputRequest,
        EmbeddingBatchChatInputRequest,
    ),
}
HELLO = [{"role": "user", "content": "hello"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": HELLO},
    COMPLETIONS: {"model": "m", "prompt": "hello"},
    RESPONSES: {"model": "m", "input": "hello", "include": ["message.output_text.logprobs"]},
    MESSAGES: {"model": "m", "messages": HELLO, "max_tokens": 5},
    EMBEDDINGS: {"model": "m", "input": "hello"},
}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SPELLINGS = (
    "16", "+16", "-16", "1_6", "16.0", "0016", "0000000016", " 16", "16 ", "\t16\n",
    "\u0661\u0666", "\uff11\uff16", "0x10",
    "1e1", "16e0", "", "true", "false", "yes", "no", "on", "off",
    "y", "t", "0", "1",
    16.0, 0.0, 1.0, 16.5, -0.0, 1e2, True, False, 0, 1, 2, 16, -1, None, [], [16], {}, {"n": 16},
)  # fmt: skip


def kinds(annotation: Any) -> set[Any]:
    """The types of an annotation, without what constrains them."""
    inner = get_args(annotation)
    if not inner or annotation in (list, dict):
        return {annotation}
    if getattr(annotation, "__origin__", None) in (list, dict):
        return {annotation.__origin__}
    return set().union(*(kinds(each) for each in inner if isinstance(each, type) or get_args(each)))


def fields_of(path: str) -> dict[str, set[Any]]:
    found: dict[str, set[Any]] = {}
    for each in CLASSES[path]:
        for name, field in each.model_fields.items():
            found.setdefault(name, set()).update(kinds(field.annotation) - {NoneType})
    return found


@pytest.mark.parametrize("path", CLASSES)
def test_each_field_of_vllm_is_obeyed_refused_or_without_effect(path: str) -> None:
    """A field that a new vLLM has, or has no more, is put where it belongs."""
    theirs = set(fields_of(path))
    obeyed, refused = PASSED_ON[path], REFUSED.keys() - PASSED_ON[path]
    own = set(PLATFORMS_OWN)
    # A template that is stored: completions' prompt is no field of responses.
    stored = {"prompt"} if path == RESPONSES else set()
    assert theirs - obeyed - refused - WITHOUT_EFFECT - own - stored == set(), "in no list"
    for one, other in ((obeyed, WITHOUT_EFFECT), (obeyed, own), (WITHOUT_EFFECT, own)):
        assert not one & other
    assert obeyed - theirs == set(), "vLLM does not have them"


@pytest.mark.parametrize("path", CLASSES)
def test_whole_numbers_and_switches_are_those_of_vllm(path: str) -> None:
    theirs = {name: found for name, found in fields_of(path).items() if name not in REFUSED}
    numbers = {name for name, found in theirs.items() if found == {int}}
    switches = {name for name, found in theirs.items() if found == {bool}}
    assert INTEGERS[path] & theirs.keys() == numbers
    assert BOOLEANS[path] & theirs.keys() == switches


def limited() -> Iterator[tuple[str, str]]:
    for path in CLASSES:
        for name in sorted((INTEGERS[path] | BOOLEANS[path]) & PASSED_ON[path]):
            yield path, name


def read(path: str, body: bytes, name: str) -> EngineRequest | None:
    """The request; None: it is refused, and the error names the field."""
    try:
        return EngineRequest.of(path, body)
    except BadRequest as error:
        if error.param != name:
            raise
        return None


def read_by_vllm(path: str, body: dict[str, Any], name: str) -> Any:
    """What vLLM makes of a field; None too where it refuses the request."""
    try:
        return getattr(CLASSES[path][0].model_validate(body), name)
    except (ValidationError, VLLMValidationError, ValueError, TypeError):
        return None


@pytest.mark.parametrize(("path", "name"), list(limited()))
def test_a_number_has_one_reading(path: str, name: str) -> None:
    passed = 0
    for spelling in SPELLINGS:
        body = {**BASE[path], name: spelling}
        text = json.dumps(body).encode()
        # A large body is read otherwise.
        for padded in (text, text + b" " * 2**18)[: 2 if name in ("n", "stream") else 1]:
            request = read(path, padded, name)
            if request is None:
                assert type(spelling) not in (int, NoneType) or name in BOOLEANS[path]
                continue
            passed += 1
            theirs = read_by_vllm(path, json.loads(request.encoded), name)
            if theirs is None:
                continue
            if spelling is not None:
                assert theirs == spelling
                assert type(theirs) is type(spelling)
            if name == "n" and theirs > 0:
                assert request.sequences == theirs
            if name in LENGTHS and spelling is not None and theirs > 0:
                assert longest(request.fields) == theirs
    assert passed >= 2


PROMPTS = (
    "a", "", [], ["a"], ["a", "b"], ["1", "2"], [1], [1, 2], [[1]], [[1], [2, 3]], [[]], [[], [1]],
    [True], [True, False], [1, True], [1.0, 2.0], [1, 2.0], [1, "2"], ["1", 2], ["a", 1], [1, "a"],
    [[1], "a"], ["a", [1]], [[1], 2], [1, [2]], [["1"]], [["1", 2], [3]], [[True]], [[1.0]],
    [None], [None, 1], ["a", None], [[None]], [[1], None], None, 7, {}, {"a": 1}, [{}], [{"a": 1}],
    [[[1]]], [[{}]],
)  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("prompt", PROMPTS, ids=json.dumps)
def test_prompts_are_counted_as_vllm_counts_them(path: str, prompt: Any) -> None:
    name = "prompt" if path == COMPLETIONS else "input"
    text = json.dumps({"model": "m", name: prompt}).encode()
    answers = set()
    for padded in (text, text + b" " * 2**18):
        request = read(path, padded, name)
        answers.add(0 if request is None else request._prompts)
    assert len(answers) == 1
    counted = answers.pop()
    theirs = read_by_vllm(path, {"model": "m", name: prompt}, name)
    if counted and theirs is not None:
        several = isinstance(theirs, list) and bool(theirs) and not isinstance(theirs[0], int)
        assert counted == (len(theirs) if several else 1)

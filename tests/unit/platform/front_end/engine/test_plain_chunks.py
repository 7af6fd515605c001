"""Streams of text alone have vLLM's own bytes: pydantic writes each of them otherwise."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.outputs import CompletionOutput, RequestOutput

from loomserve.platform.front_end.engine.answers import plain_chunks
from loomserve.platform.front_end.engine.answers.deltas import Delta
from loomserve.platform.front_end.engine.answers.plain_chunks import Template
from tests.unit.platform.front_end.engine.answering import Answering

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, TEXT: {"prompt": "x"}}
# Text, quotes, new lines, parts of characters of several bytes.
TOKENS = [*range(300, 340), 0, 5, *range(60, 75), 198, 199, *range(1, 30), 400, 401]
_CREATED = re.compile(rb'"created":\d+|"chatcmpl-[^"]*"|"cmpl-[^"]*"')


def written(kind: str, text: str, name: str, said: str, **more: Any) -> str:
    """A chunk as vLLM writes it."""
    common: dict[str, Any] = {"id": name, "created": 7, "model": said}
    if kind == CHAT:
        choice: Any = ChatCompletionResponseStreamChoice(
            index=0, delta=DeltaMessage(content=text), logprobs=None,
            **{"finish_reason": None, "token_ids": None, **more},
        )  # fmt: skip
        made: Any = ChatCompletionStreamResponse(
            object="chat.completion.chunk", choices=[choice], **common
        )
    else:
        choice = CompletionResponseStreamChoice(
            index=0, text=text, logprobs=None, stop_reason=None, prompt_token_ids=None,
            **{"finish_reason": None, "token_ids": None, **more},
        )  # fmt: skip
        made = CompletionStreamResponse(object="text_completion", choices=[choice], **common)
    return f"data: {made.model_dump_json(exclude_unset=True)}\n\n"


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ['"}', "\\", "\x00\x1f\x7f", "\u2028\u2029", "\U0001f600", '"},"logprobs":null', "null"]
)


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@settings(deadline=None)
@given(first=texts, then=texts, name=texts, said=texts)
def test_a_template_writes_what_pydantic_does(
    kind: str, first: str, then: str, name: str, said: str
) -> None:
    template = Template.of(written(kind, first, name, said), first)
    assert template is not None
    assert template.chunk(then) == written(kind, then, name, said)


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@pytest.mark.parametrize(
    "more", [{"finish_reason": "stop"}, {"token_ids": [1]}, {"token_ids": []}], ids=str
)
def test_a_chunk_that_says_more_is_no_template(kind: str, more: dict[str, Any]) -> None:
    assert Template.of(written(kind, "a", "i", "m", **more), "a") is None


def test_neither_is_one_of_another_text_or_with_usage() -> None:
    chunk = written(CHAT, "ab", "i", "m")
    assert Template.of(chunk, "a") is None
    usage = chunk.replace("]}\n", '],"usage":{"total_tokens":1}}\n')
    assert Template.of(usage, "ab") is None


@pytest.fixture(scope="module")
def server() -> Iterator[Answering]:
    made = Answering(tokens=TOKENS)
    yield made
    made.close()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "asked",
    [
        {}, {"max_tokens": 1}, {"max_tokens": 2}, {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"n": 2}, {"echo": True}, {"stop": "zz"}, {"stop": "a"}, {"return_token_ids": True},
        {"skip_special_tokens": False}, {"detokenize": False} , {"logprobs": 1}, {"min_tokens": 5},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_stream_is_vllms(
    server: Answering, path: str, asked: dict[str, Any], at_once: int
) -> None:
    if path == CHAT and "logprobs" in asked:
        asked = {"logprobs": True, "top_logprobs": 1}
    server.at_once = at_once
    body = {"stream": True, "max_tokens": len(TOKENS), **ASKED[path], **asked}
    ours = server.answer(path, body, ours=True)
    if "logprobs" in asked:
        server.at_once = 1  # those are not added up, as vLLM does where it is behind
    theirs = server.answer(path, body, ours=False)
    assert _CREATED.sub(b"", ours) == _CREATED.sub(b"", theirs)
    assert ours.endswith(b"data: [DONE]\n\n")


def test_most_chunks_of_a_plain_stream_are_not_pydantics(
    server: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    plain = Template.chunk
    monkeypatch.setattr(Template, "chunk", lambda *args: filled.append(1) or plain(*args))
    made = []
    look = Delta.__getattr__
    monkeypatch.setattr(Delta, "__getattr__", lambda *args: made.append(1) or look(*args))
    server.at_once = 1
    for path in (CHAT, TEXT):
        filled.clear()
        server.answer(path, {**ASKED[path], "stream": True, "max_tokens": 50}, ours=True)
        assert len(filled) >= 45
    assert not made


def outputs(*texts: str) -> list[RequestOutput]:
    return [
        RequestOutput("r", "", [1], None, [CompletionOutput(0, text, [2], None, None)], False)
        for text in texts
    ]


async def _stream(results: AsyncIterator[Any]) -> AsyncIterator[str]:
    """As vLLM's: an error becomes a chunk."""
    try:
        async for result in results:
            yield written(CHAT, result.outputs[0].text, "i", "m")
    except RuntimeError as error:
        yield f"error {error}"
    yield "done"


def _told(given: list[Any]) -> list[str]:
    async def results() -> AsyncIterator[Any]:
        for each in given:
            if isinstance(each, Exception):
                raise each
            yield each

    async def chunks() -> list[str]:
        made = plain_chunks.plain_chunks(_stream, results(), empty=True)  # type: ignore[arg-type]
        return [chunk async for chunk in made]

    return asyncio.run(chunks())


def _delta(text: str) -> Delta:
    return Delta(None, [3], text)  # type: ignore[arg-type]


def test_an_error_in_the_midst_is_vllms_to_tell() -> None:
    told = _told([*outputs("a"), _delta("b"), RuntimeError("x")])
    assert told == [*(written(CHAT, text, "i", "m") for text in "ab"), "error x", "done"]


def test_vllm_counts_the_tokens_that_it_has_not_seen() -> None:
    (last,) = outputs("c")
    _told([*outputs("a"), _delta("b"), last])
    assert last.outputs[0].token_ids == [3, 2]


def test_a_text_that_cannot_be_sent_is_vllms() -> None:
    broken = _delta("\ud800")
    broken.outputs = outputs("x")[0].outputs
    told = _told([*outputs("a"), broken])
    assert json.loads(told[1].removeprefix("data: "))["choices"][0]["delta"]["content"] == "x"

"""A stream that waits hears comments, and then the answer or an event with the error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Message

from loomserve.platform.http.held_answer import COMMENT, HeldAnswer

HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"x", b"1")],
}
PIECES = (b"data: 1\n\n", b"data: [DONE]\n\n")


def answer(status: int = 200, pieces: Sequence[bytes] = PIECES) -> list[Message]:
    last = len(pieces) - 1
    return [
        {**HEAD, "status": status},
        *(
            {"type": "http.response.body", "body": piece, "more_body": place < last}
            for place, piece in enumerate(pieces)
        ),
    ]


Work = Callable[[HeldAnswer, list[Message]], Awaitable[None]]


def sent(work: Work, period_s: float = 0.01) -> list[Message]:
    """What is sent, which ``work`` sees grow."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def main() -> None:
        held = HeldAnswer(send)
        async with held.comments(period_s):
            await work(held, messages)

    asyncio.run(main())
    return messages


async def _until_comments(messages: list[Message], number: int) -> None:
    # The stream's head is the first.
    while len(messages) < 1 + number:  # noqa: ASYNC110 - others append
        await asyncio.sleep(0.001)


async def _say(held: HeldAnswer, messages: Sequence[Message]) -> None:
    for message in messages:
        await held.send(message)


def test_an_answer_that_comes_soon_is_as_it_would_be() -> None:
    assert sent(lambda held, _: _say(held, answer()), period_s=5) == answer()


def test_comments_begin_the_stream_and_the_answer_goes_on_without_a_head() -> None:
    async def work(held: HeldAnswer, messages: list[Message]) -> None:
        await _until_comments(messages, 2)
        await _say(held, answer())
        await asyncio.sleep(0.05)

    messages = sent(work)
    assert messages[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in messages[0]["headers"]
    bodies = [message["body"] for message in messages[1:]]
    comments = bodies.count(COMMENT)
    assert comments >= 2
    assert bodies == [COMMENT] * comments + list(PIECES)
    assert [message["more_body"] for message in messages[-2:]] == [True, False]


def test_an_error_after_comments_is_an_event() -> None:
    async def work(held: HeldAnswer, messages: list[Message]) -> None:
        await _until_comments(messages, 1)
        await _say(held, answer(400, [b'{"error": {}}']))

    messages = sent(work)
    assert [message["type"] for message in messages].count("http.response.start") == 1
    assert messages[-1]["body"] == b'data: {"error": {}}\n\n'
    assert not messages[-1]["more_body"]


def test_an_error_before_any_comment_keeps_its_status() -> None:
    refused = answer(400, [b"{}"])
    assert sent(lambda held, _: _say(held, refused), period_s=5) == refused


def test_nothing_is_said_once_it_has_ended() -> None:
    async def work(held: HeldAnswer, messages: list[Message]) -> None:
        pass

    assert sent(work) == []

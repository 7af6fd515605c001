from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.requests.answer_tokens import HiddenUsage, LastUsage, RunningUsage

DONE = b"data: [DONE]\n\n"
# What a model may say: it must neither be counted nor taken out.
SPOOFS = [
    '"usage":{"prompt_tokens":0,"completion_tokens":0}',
    '","choices":[],"usage":{}}\n\n',
    "é",
]


def encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def event(text: str | None, told: dict[str, Any] | None) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    chunk: dict[str, Any] = {"id": "x", "model": "m", "choices": choices}
    if told is not None:
        chunk["usage"] = told
    return b"data: " + encoded(chunk) + b"\n\n"


def stream(texts: list[str], *, within: bool, last: bool) -> bytes:
    events = [event(text, usage(9, n + 1) if within else None) for n, text in enumerate(texts)]
    if last:
        events.append(event(None, usage(9, len(texts))))
    return b"".join(events) + DONE


def pieces(body: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    return [body[a:b] for a, b in itertools.pairwise(places)]


CUTS = st.lists(st.integers(0, 2000), max_size=30)
TEXTS = st.lists(st.sampled_from(SPOOFS) | st.text(max_size=10), max_size=8)


@given(TEXTS, CUTS, st.booleans())
def test_a_client_gets_the_stream_that_it_asked_for(
    texts: list[str], cuts: list[int], keeps_last: bool
) -> None:
    hidden = HiddenUsage(keeps_last=keeps_last)
    told = stream(texts, within=True, last=True)
    shown = b"".join(map(hidden.feed, pieces(told, cuts))) + hidden.rest()
    assert shown == stream(texts, within=False, last=keeps_last)


@given(TEXTS, CUTS)
def test_a_stream_that_tells_its_usage_is_counted_exactly(
    texts: list[str], cuts: list[int]
) -> None:
    running = RunningUsage(4000)
    for piece in pieces(stream(texts, within=True, last=True), cuts):
        running.feed(piece)
    assert running.tokens(complete=True) == (9, len(texts))


@given(TEXTS.filter(bool), CUTS, st.data())
def test_a_stream_that_is_cut_off_is_counted_so_far(
    texts: list[str], cuts: list[int], data: st.DataObject
) -> None:
    whole = data.draw(st.integers(1, len(texts)))
    cut = b"".join(event(text, usage(9, n + 1)) for n, text in enumerate(texts[:whole]))
    running = RunningUsage(4000)
    for piece in pieces(cut + b'data: {"id":"x","cho', cuts):
        running.feed(piece)
    assert running.tokens(complete=False) == (9, whole)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (encoded({"choices": [{"text": SPOOFS[0]}], "usage": usage(9, 5)}), (9, 5)),
        (encoded({"usage": usage(9, 5), "prompt_logprobs": [{"1": {"rank": 1}}] * 99}), (9, 5)),
        (encoded({"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}), (7, 0)),
        (
            encoded(
                {
                    "content": [{"input": {"usage": {"input_tokens": 0, "output_tokens": 0}}}],
                    "usage": {
                        "input_tokens": 2,
                        "output_tokens": 5,
                        "cache_creation_input_tokens": 3,
                        "cache_read_input_tokens": 4,
                    },
                }
            ),
            (9, 5),
        ),
    ],
    ids=["text that looks like it", "much behind it", "embeddings", "a tool's input"],
)
@given(cuts=CUTS)
def test_a_whole_answer_is_counted(body: bytes, tokens: tuple[int, int], cuts: list[int]) -> None:
    running = RunningUsage(4000)
    for piece in pieces(body, cuts):
        running.feed(piece)
    assert running.tokens(complete=True) == tokens
    last = LastUsage()
    last.feed(body)
    last.feed(b"")
    assert last.tokens(complete=True) == tokens
    assert last.tokens(complete=False) is None


def test_the_last_usage_of_a_stream_is_found_among_its_last_pieces() -> None:
    last = LastUsage()
    for text in "abcdef":
        last.feed(event(text, None))
    assert last.tokens(complete=True) is None
    last.feed(event(None, usage(9, 6)))
    last.feed(DONE)
    assert last.tokens(complete=True) == (9, 6)


def test_messages_tell_their_prompt_first_and_events_stand_for_what_is_missing() -> None:
    running = RunningUsage(4000)
    message = {"message": {"usage": {"input_tokens": 11, "output_tokens": 0}}}
    running.feed(b"event: message_start\ndata: " + encoded(message) + b"\n\n")
    for _ in range(6):
        running.feed(b'event: content_block_delta\ndata: {"delta":{}}\n\n')
    assert running.tokens(complete=False) == (11, 7)
    told = {"delta": {}, "usage": {"input_tokens": 11, "output_tokens": 6}}
    running.feed(b"event: message_delta\ndata: " + encoded(told) + b"\n\n")
    assert running.tokens(complete=True) == (11, 6)


def test_what_tells_nothing_is_judged_by_its_size() -> None:
    assert RunningUsage(4000).tokens(complete=False) == (1000, 0)

"""Forms are read once, as the engine's server reads them, and their files stay where they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest
from starlette.requests import Request

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.form_body import MOST_PARTS, PIECE_BYTES, ClientForm
from tests.unit.platform.requests.forms import BOUNDARY, SOUND, a_form, part

PATH = "/v1/audio/transcriptions"


def parsed(request: EngineRequest) -> tuple[dict[str, str], bytes]:
    """The form as Starlette reads it: the fields, and the file."""
    pieces = list(request.pieces())
    assert sum(map(len, pieces)) == request.size
    assert max(map(len, pieces)) <= PIECE_BYTES

    async def read() -> tuple[dict[str, str], bytes]:
        async def receive() -> Any:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        headers = [(b"content-type", request.content_type)]
        scope = {"type": "http", "method": "POST", "headers": headers}
        async with Request(scope, receive).form() as form:
            file: Any = form["file"]
            texts = {key: str(form[key]) for key in form if key != "file"}
            return texts, await file.read()

    return asyncio.run(read())


@pytest.mark.parametrize("sound", [b"", SOUND, SOUND * 1024, b"\r\n--" + BOUNDARY[:-1]])
def test_what_was_added_holds_and_the_file_is_the_clients(sound: bytes) -> None:
    fields = {"model": "alias", "language": "de", "timestamp_granularities[]": "segment"}
    request = EngineRequest.of(PATH, *a_form(fields, sound))
    assert parsed(request) == (fields, sound)
    hinted = request.for_model("m").with_hints(deadline=1.5)
    texts, file = parsed(hinted)
    assert file == sound
    assert json.loads(texts.pop("vllm_xargs")) == hinted.fields["vllm_xargs"]
    assert texts == {**fields, "model": "m"}


def test_fields_have_the_types_that_the_platform_looks_at() -> None:
    given = {"stream": "TRUE", "n": "3", "vllm_xargs": '{"a": 1}', "prompt": "true"}
    form = ClientForm.of(*a_form(given))
    assert form.fields == {"stream": True, "n": 3, "vllm_xargs": {"a": 1}, "prompt": "true"}
    listed = a_form({"a[]": "x"}, more=part("a[]", b"y"))
    assert ClientForm.of(*listed).fields == {"a[]": "x,y"}
    assert ClientForm.of(*a_form({"stream": "false"})).fields == {"stream": False}


FORM, KIND = a_form({"model": "m"})
WRONG = {
    "no boundary": (FORM, b"multipart/form-data"),
    "JSON": (b"{}", b"application/json"),
    "another charset": (FORM, KIND + b"; charset=utf-16"),
    "cut short": (FORM[:-6], KIND),
    "cut before": (FORM[:100], KIND),
    "more after it": (FORM + part("model", b"other") + b"--" + BOUNDARY + b"--\r\n", KIND),
    "no file": a_form({"model": "m"}, None),
    "a file as a text": a_form({"file": "x"}, None),
    "a file elsewhere": a_form({}, more=part("other", b"x", file="b.wav")),
    "two files": a_form({}, more=part("file", b"x", file="b.wav")),
    "two models": a_form({"model": "m"}, more=part("model", b"n")),
    "no name": a_form({}, more=b"--" + BOUNDARY + b"\r\nX: y\r\n\r\nz\r\n"),
    "not UTF-8": a_form({}, more=part("model", b"\xff")),
    "a long field": a_form({"prompt": "x" * (2**16 + 1)}),
    "many fields": a_form({f"f{each}": "" for each in range(MOST_PARTS)}),
    "n": a_form({"n": "two"}),
    "n of another script": a_form({"n": "²"}),
    "xargs": a_form({"vllm_xargs": "[1]"}),
    "the connector": a_form({"vllm_xargs": '{"kv_transfer_params": "x"}'}),
    "the platform's hint": a_form({"vllm_xargs": '{"loomserve_background": 1}'}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_such_form_is_refused(case: str) -> None:
    with pytest.raises(BadRequest) as refused:
        EngineRequest.of(PATH, *WRONG[case])
    assert len(refused.value.message) < 300


NASTY = {
    "parts": (part("a[]", b"") * 100_000 + FORM, KIND),
    "a header": (b"--" + BOUNDARY + b"\r\n" + b"X: " + b"y" * 8 * 2**20 + FORM, KIND),
    "boundaries that are none": a_form({}, (b"\r\n--" + BOUNDARY[:-1]) * 500_000),
    "lines": a_form({}, b"\r\n" * 4 * 2**20),
    "lines before": (b"\r\n" * 4 * 2**20 + FORM, KIND),
}


@pytest.mark.parametrize("case", NASTY)
def test_a_large_form_of_any_shape_costs_little(case: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(BadRequest):
        EngineRequest.of(PATH, *NASTY[case])
    assert time.thread_time() - began < 0.2


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", "2", "only a beam search"),
        ("include[]", "logprobs", "leave it out"),
        ("chunking_strategy", '{"type": "server_vad"}', "where they are quiet"),
        ("known_speaker_names[]", "Anna", "not told apart"),
        ("timestamp_granularities[]", "word", "of segments"),
    ],
)
def test_what_a_recording_is_not_asked_for_is_refused(field: str, value: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        EngineRequest.of(PATH, *a_form({"model": "m", field: value}))
    assert refused.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"n": "1"},
        {"n": "2", "use_beam_search": "true"},
        {"chunking_strategy": "auto"},
        {"timestamp_granularities[]": "segment"},
        {"response_format": "verbose_json", "language": "en", "whatever": "x"},
    ],
)
def test_what_asks_for_nothing_else_is_taken(fields: dict[str, str]) -> None:
    EngineRequest.of(PATH, *a_form({"model": "m", **fields}))

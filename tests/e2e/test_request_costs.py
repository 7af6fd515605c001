"""Whatever a request asks for, it is answered in time, and no engine ends or stands still."""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import COLD, HOT, Platform
from tests.forks import descendants

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": HOT, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "top_logprobs", "min_tokens",
)  # fmt: skip


def engines(platform: Platform) -> set[int]:
    return {
        process.pid
        for process in descendants(platform.process)
        if "EngineCore" in " ".join(process.cmdline())
    }


@pytest.fixture
def same_engines(platform: Platform) -> Iterator[None]:
    before = engines(platform)
    yield
    assert engines(platform) == before


def test_a_model_that_lacks_an_endpoint_says_which_it_has(platform: Platform) -> None:
    with platform.http() as http:
        response = http.post("/v1/embeddings", json={"model": HOT, "input": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "endpoint_not_found")
    assert CHAT in error["message"]


def test_what_is_beyond_a_bound_is_refused_by_the_gateway(platform: Platform) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {**BODY, "structured_outputs": {"json": deep}}, "structured_outputs"),
        (COMPLETIONS, {"model": HOT, "prompt": ["x"] * 1024, "n": 128}, "prompt"),
        (COMPLETIONS, {"model": HOT, "prompt": "word " * 10_000}, "prompt"),
        ("/v1/tokenize", {"model": HOT, "prompt": "word " * 10_000}, "prompt"),
    ]
    with platform.http() as http:
        for path, body, param in cases:
            response = http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        many = {"model": HOT, "prompt": ["x"] * 128, "max_tokens": 1}
        assert len(http.post(COMPLETIONS, json=many).json()["choices"]) == 128


@pytest.mark.usefixtures("same_engines")
def test_numbers_that_are_none_are_never_an_error_of_ours(platform: Platform) -> None:
    with platform.http() as http:
        for field in NUMBERS:
            for value in (b"NaN", b"-Infinity", b"-0", b"1" + b"0" * 400, b"1e400"):
                text = json.dumps({**BODY, "logprobs": True, field: "?"}).encode()
                response = http.post(CHAT, content=text.replace(b'"?"', value))
                refused = 400 if value in (b"NaN", b"-Infinity", b"1e400") else 499
                assert response.status_code in (200, *range(400, refused + 1)), (field, value)
        assert http.post(CHAT, json=BODY).status_code == 200


VALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**BODY, "n": 2, "stop": ["."], "logit_bias": {"5": 1.5}, "seed": 7}),
    (CHAT, {**BODY, "response_format": {"type": "json_object"}, "stream": True}),
    (CHAT, {**BODY, "structured_outputs": {"choice": ["yes", "no"]}}),
    (CHAT, {**BODY, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
    (COMPLETIONS, {"model": HOT, "prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}),
    ("/v1/responses", {"model": HOT, "input": "hello", "max_output_tokens": 2, "store": False}),
    ("/v1/messages", {**BODY, "system": "be brief", "stop_sequences": ["."]}),
    ("/v1/tokenize", {"model": HOT, "messages": BODY["messages"]}),
]
KEPT = ("model", "max_tokens", "max_output_tokens", "min_tokens")
ODD = [None, True, 0, -1, 2**63, 10**30, 0.5, "", "x", "\x00", "é" * 9, [], {}, [None], {"": []}]


def mutated(rng: random.Random, value: Any) -> Any:
    """The value with one of its parts replaced, removed, doubled or renamed."""
    value = copy.deepcopy(value)
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return value
        # Answers without a bound would only take long.
        key = rng.choice([k for k in keys if k not in KEPT] or keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.6:
            at = at[key]
            continue
        change = rng.randrange(3)
        if change == 0:
            del at[key]
        elif change == 1:
            at[key] = rng.choice([at[key], [at[key]], {"a": at[key]}])
        else:
            at[key] = rng.choice(ODD)
        return value


@pytest.mark.slow
@pytest.mark.usefixtures("same_engines")
def test_no_mutation_of_a_valid_body_is_an_error_of_ours(platform: Platform) -> None:
    rng = random.Random(7)
    failed = []
    with platform.http() as http:
        for _ in range(500):
            path, body = rng.choice(VALID)
            body = {"max_tokens": 2, **mutated(rng, body)}
            try:
                response = http.post(path, json=body)
            except httpx.TimeoutException:
                failed.append((path, body, "no answer"))
                continue
            if response.status_code >= 500 or b"internal" in response.content.lower():
                failed.append((path, body, response.text[:200]))
        assert not failed, "\n".join(map(str, failed))
        assert http.post(CHAT, json=BODY).status_code == 200


def _chain(depth: int, name: str, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"type": "array", "items": leaf} if name == "arrays" else {"anyOf": [leaf, {}]}
    return leaf


def _grammars() -> Iterator[dict[str, Any]]:
    schemas: list[Any] = [
        *({"anyOf": [_chain(d, "arrays", {"const": i}) for i in range(30)]} for d in (10, 30, 58)),
        *(_chain(d, "unions", {"type": "string"}) for d in (5, 20, 31, 60)),
        *({"type": "array", "minItems": n, "maxItems": 10**9} for n in (0, 10**3, 10**9)),
        *({"type": "string", "minLength": n, "maxLength": 10**9} for n in (0, 10**9)),
        *({"type": "object", "properties": {f"p{i}": {} for i in range(n)}} for n in (9, 256, 999)),
        *({"enum": [f"value {i}" for i in range(n)]} for n in (1, 4000, 10**5)),
        *({"type": "string", "pattern": p} for p in ("(a+)+$", "[a-z]" * 1600, "(.*a){900}", "(")),
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 99}}, "$ref": "#/$defs/a"},
        {"type": "integer", "minimum": -(10**18), "maximum": 10**18},
        {"type": "number", "multipleOf": 0.1},
        {"type": "nothing"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"patternProperties": {"^(a|b)+$": {}}, "type": "object"},
        7,
        "{",
    ]
    for schema in schemas:
        yield {"structured_outputs": {"json": schema}}
    for regex in ("(a+)+b", "(a{1,1000}){1,1000}", "(.{1,9999}b){1,9999}", "[", "\x00", "a" * 9000):
        yield {"structured_outputs": {"regex": regex}}
    for grammar in (
        'root ::= "a"{1,1000000}', 'root ::= root "a" | "b"', "root ::= x*\nx ::= x x | [a-z]",
        "root ::= " + "(" * 4000, "start: start", 'root ::= "' + "x" * 8000 + '"', "", "?",
        "root ::= " + " | ".join(f'"{i}" root' for i in range(600)),
    ):  # fmt: skip
        yield {"structured_outputs": {"grammar": grammar}}
    for number, length in ((10**5, 1), (1000, 60), (60, 1000), (1, 60_000), (0, 0)):
        choices = [str(i) + "x" * length for i in range(number)]
        yield {"structured_outputs": {"choice": choices}}
    for tag in ({}, {"format": 7}, {"structures": [], "triggers": []}, {"format": {"type": "?"}}):
        yield {"response_format": {"type": "structural_tag", **tag}}
        yield {"structured_outputs": {"structural_tag": json.dumps(tag)}}


@pytest.mark.slow
@pytest.mark.usefixtures("same_engines")
def test_grammars_are_refused_or_answered_while_others_streams_go_on(platform: Platform) -> None:
    before = memory_of(platform)
    gaps: list[float] = []
    done = threading.Event()

    def others() -> None:
        with platform.http() as http:
            while not done.is_set():
                body = {**BODY, "model": HOT, "stream": True, "max_tokens": 400, "ignore_eos": True}
                with http.stream("POST", CHAT, json=body) as response:
                    last = time.monotonic()
                    for _ in response.iter_bytes():
                        gaps.append(time.monotonic() - last)
                        last = time.monotonic()
                        if done.is_set():
                            return

    stream = threading.Thread(target=others)
    stream.start()
    try:
        with platform.http() as http:
            for asked in _grammars():
                try:
                    status = http.post(CHAT, json={**BODY, **asked}, timeout=40).status_code
                except httpx.TimeoutException:
                    status = 0
                assert status in (200, 400, 413), (status, json.dumps(asked)[:200])
            assert http.post(CHAT, json={**BODY, "model": COLD}).status_code == 200
    finally:
        done.set()
        stream.join(60)
    assert max(gaps) < 10
    assert memory_of(platform) - before < 1024 * 2**20


def memory_of(platform: Platform) -> int:
    return sum(
        psutil.Process(process.pid).memory_info().rss for process in descendants(platform.process)
    )

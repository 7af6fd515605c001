"""No value of any field of any endpoint makes an error large, slow, or the platform's own."""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loomserve.platform.requests.engine_request import FORWARDED
from tests.unit.platform.front_end.engine.server import TAKEN, Server

MOST_BYTES = 2**16
MOST_MEMORY = 64 * 2**20
"""That all these requests may add to what the process has at once."""
MOST_S = 0.2
"""Processor time of one request, of all threads."""
EACH = int(os.environ.get("LOOMSERVE_WRONG_VALUES", "2"))
"""Values that each field gets of those below; with 1000, all of them, there are 12,000 requests."""

CHAT, MESSAGES = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]
SOUND: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "Hello"},
    "/v2/embed": {"texts": ["Hello"]},
    "/v1/pooling": {"input": "Hello"},
    "/pooling": {"input": "Hello"},
    **{key: {"query": "a", "documents": ["b"]} for key in ("/v1/rerank", "/v2/rerank", "/rerank")},
    **{key: {"queries": "a", "documents": ["b"]} for key in ("/v1/score", "/score")},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions/render": {"prompt": "Hello"},
    "/v1/messages/render": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/tokenize": {"prompt": "Hello"},
    "/v1/detokenize": {"tokens": [1, 2]},
}
_NESTED: Any = 1
for _ in range(200):
    _NESTED = {"a": [_NESTED]}

ENTRIES: dict[str, Any] = {
    "objects": {}, "numbers": 7, "texts": "a", "lists": [], "fractions": 0.5, "nulls": None,
    "messages": {"role": "user", "content": {}},
    "tools": {"type": "function", "function": {"name": "f", "parameters": {"pattern": "["}}},
    "calls": {"type": "function_call", "call_id": "a", "name": 1, "arguments": "{"},
    "parts": {"role": "user", "content": [{"type": "text", "text": {}}] * 3},
    "pairs": [1, "a"],
}  # fmt: skip
VALUES: dict[str, Callable[[], Any]] = {
    f"{count} {name}": lambda count=count, one=one: [one] * count
    for name, one in ENTRIES.items()
    for count in (1, 100, 10_000)
}
VALUES |= {
    f"{count} names": lambda count=count: {f"k{number}": {} for number in range(count)}
    for count in (1, 100, 10_000)
}
VALUES |= {
    "text": lambda: "word " * 6_000,
    "paths": lambda: "/a" * 15_000,
    "brackets": lambda: "[{(" * 10_000,
    "texts of a list": lambda: ["x" * 300] * 100,
    "nested": lambda: _NESTED,
    "nested lists": lambda: [[[[[]]] * 10] * 10] * 10,
    "object": dict, "number": lambda: 3, "negative": lambda: -1, "many": lambda: 2**62,
    "too many": lambda: 10**30, "fraction": lambda: 1.5, "true": lambda: True,
    "null": lambda: None, "empty": lambda: "",
}  # fmt: skip


@pytest.fixture(scope="module", params=["generate", "embed"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    options = {"runner": "pooling", "convert": "embed"} if request.param == "embed" else {}
    made = Server((request.param,), **options)
    for path, body in SOUND.items():
        if made.request_classes(path):
            made.ask(path, body)
    before = peak_memory()
    yield made
    made.close()
    assert peak_memory() - before <= MOST_MEMORY


def peak_memory() -> int:
    """The most bytes that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fields(server: Server, path: str) -> list[str]:
    return sorted({name for each in server.request_classes(path) for name in each.model_fields})


def cost_s(server: Server, path: str, body: bytes) -> tuple[float, int, bytes]:
    """The least of three, for what else the machine does makes a request slower, too."""
    least = float("inf")
    for _ in range(3):
        began = time.process_time()
        status, answer = server.ask(path, body)
        least = min(least, time.process_time() - began)
        if least <= MOST_S / 2:
            break
    return least, status, answer


@pytest.mark.parametrize("path", FORWARDED)
def test_wrong_values_cost_little_and_are_the_clients_own(server: Server, path: str) -> None:
    wrong = []
    for field in fields(server, path):
        names = list(VALUES)
        random.Random(f"{path} {field}").shuffle(names)
        for name in names[:EACH]:
            body = json.dumps({"model": "m", **SOUND[path], field: VALUES[name]()}).encode()
            took_s, status, answer = cost_s(server, path, body)
            too_large = status >= 400 and len(answer) > MOST_BYTES
            if took_s > MOST_S or too_large or status >= 500:
                wrong.append((field, name, round(took_s, 3), status, answer[:200]))
    assert wrong == []


def test_the_requests_that_the_others_change_are_sound(server: Server) -> None:
    for path, body in SOUND.items():
        if server.request_classes(path):
            status, answer = server.ask(path, {"model": "m", **body})
            assert status in (200, TAKEN), answer

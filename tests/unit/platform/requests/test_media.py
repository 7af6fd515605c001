from __future__ import annotations

import time
from typing import Any

import pytest

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.media import check_media

PIXEL = "data:image/png;base64,AAAA"
ELSEWHERE = [
    "http://127.0.0.1/x.png",
    "http://169.254.169.254/latest/meta-data",
    "http://[::ffff:169.254.169.254]/",
    "http://2852039166/",
    "https://example.org@127.0.0.1/",
    "http://127.0.0.1\\@example.org/",
    "file:///etc/passwd",
    "ftp://example.org/x",
    "//example.org/x",
    "http://",
    "http://[",
    "x",
]


def messages(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]}


def places(url: str) -> dict[str, dict[str, Any]]:
    """A link at each place that an endpoint looks at."""
    source = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    return {
        "chat": messages({"type": "image_url", "image_url": {"url": url}}),
        "chat, in short": messages({"image_url": url}),
        "audio": messages({"type": "audio_url", "audio_url": {"url": url}}),
        "video": messages({"type": "video_url", "video_url": {"url": url}}),
        "messages": messages(source),
        "a tool's result": messages({"type": "tool_result", "content": [source]}),
        "responses": {"input": [item]},
        "responses' file": {"input": [{"content": [{"type": "input_file", "file_url": url}]}]},
        "a function's output": {"input": [{"type": "function_call_output", "output": [source]}]},
    }


@pytest.mark.parametrize("place", places(""))
@pytest.mark.parametrize("url", ELSEWHERE)
@pytest.mark.parametrize("hosts", [(), ("media.example",)])
def test_a_link_to_another_host_is_refused(place: str, url: str, hosts: tuple[str, ...]) -> None:
    fields = places(url)[place]
    with pytest.raises(BadRequest, match="data:image/png;base64") as refusal:
        check_media(fields, hosts)
    assert refusal.value.param == next(iter(fields))
    assert ("media.example" in refusal.value.message) == bool(hosts)


@pytest.mark.parametrize("place", places(""))
@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        (PIXEL, ()),
        (PIXEL.replace("data", "DATA"), ()),
        ("https://media.example/x.png", ("media.example",)),
        ("http://MEDIA.example:8080/x.png", ("media.example",)),
    ],
)
def test_media_in_the_request_or_on_a_named_host_pass(
    place: str, url: str, hosts: tuple[str, ...]
) -> None:
    check_media(places(url)[place], hosts)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "x", "input": 3},
        {"messages": [None, 3, [], {"content": None}, {"content": "http://127.0.0.1/"}]},
        messages({"image_url": None}),
        messages({"image_url": {"url": 3}}),
        messages({"image_url": [3]}),
        {"input": "http://127.0.0.1/"},
        {"input": ["http://127.0.0.1/"]},
        {"messages": [{"content": [{"type": "text", "text": "see http://127.0.0.1/"}]}]},
    ],
)
def test_what_is_no_link_is_left_to_the_engine(fields: dict[str, Any]) -> None:
    check_media(fields, ())


def test_depth_costs_no_more_than_size() -> None:
    deep: Any = {"image_url": "http://127.0.0.1/"}
    for _ in range(100_000):
        deep = {"content": [deep]}
    began_s = time.process_time()
    with pytest.raises(BadRequest):
        check_media({"messages": [deep]}, ())
    assert time.process_time() - began_s < 5
    while deep.get("content"):  # freed one by one: Python would recurse
        deep = deep["content"].pop()

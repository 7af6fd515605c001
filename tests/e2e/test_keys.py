"""API keys that come and go, and run out of tokens."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loomserve.platform.base.files import replace_private
from tests.e2e.conftest import HOT, LOOMSERVE, Platform
from tests.e2e.test_kvstore import TOKENS_A_BLOCK, new_prompt
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

CHAT = "/v1/chat/completions"
LIMITED = "limited-in-tokens"
# The platform promises one second; the machine that tests may be busy.
NOTICED_S = 5.0


def key_command(*words: str | Path) -> str:
    command = [LOOMSERVE, "key", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def config(platform: Platform) -> Iterator[Path]:
    folder = platform.log.parent
    yield folder / "config.yaml"
    replace_private(folder / "keys.yaml", "api_keys: []")


def new_key(config: Path, name: str) -> str:
    found = re.search(r"lsk-\S+", key_command("create", name, "--add", config))
    assert found
    return found[0]


def status(platform: Platform, key: str) -> int:
    with platform.http(key) as http:
        return http.get("/v1/models").status_code


def noticed(platform: Platform, key: str, expected: int) -> float:
    """Seconds until requests of a key are answered with a status."""
    began_s = time.monotonic()
    while status(platform, key) != expected:
        assert time.monotonic() < began_s + NOTICED_S
        time.sleep(0.05)
    return time.monotonic() - began_s


class Streaming(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, platform: Platform, key: str) -> None:
        super().__init__()
        self._platform, self._key = platform, key
        self.began = threading.Event()
        self.text = ""

    def run(self) -> None:
        body = {
            "model": HOT,
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": 120,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            self._platform.http(self._key) as http,
            http.stream("POST", CHAT, json=body) as response,
        ):
            for piece in response.iter_text():
                self.text += piece
                self.began.set()


def test_a_revoked_key_is_refused_at_once_and_streams_go_on(
    platform: Platform, config: Path
) -> None:
    leaked = new_key(config, "leaked")
    noticed(platform, leaked, 200)
    streams = [Streaming(platform, key) for key in (platform.key, leaked)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.began.wait(30)
    # As loomserve key revoke does, which takes seconds to start on a busy machine.
    replace_private(config.parent / "keys.yaml", "api_keys: []")
    noticed(platform, leaked, 401)
    assert any(stream.is_alive() for stream in streams), "they ended before the key was revoked"
    for stream in streams:
        stream.join(60)
        assert stream.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in stream.text
    assert status(platform, platform.key) == 200


def test_a_broken_keys_file_opens_nothing_and_closes_nothing(
    platform: Platform, config: Path
) -> None:
    key = new_key(config, "kept")
    noticed(platform, key, 200)
    replace_private(config.parent / "keys.yaml", "api_keys: [")
    began_s = time.monotonic()
    while platform.metric("loomserve_keys_file_up") != 0:
        assert time.monotonic() < began_s + NOTICED_S
    assert [status(platform, each) for each in (key, platform.key, "lsk-any")] == [200, 200, 401]


def events(body: dict[str, Any], ask: Callable[..., httpx.Response]) -> list[dict[str, Any]]:
    answer = ask(CHAT, json={"model": HOT, "stream": True, "temperature": 0, **body})
    answer.raise_for_status()
    lines = [each.removeprefix("data: ") for each in answer.text.splitlines() if each]
    assert lines.pop() == "[DONE]"
    return [json.loads(each) for each in lines]


def test_tokens_are_counted_as_the_engine_counts_them_until_there_are_none_left(
    platform: Platform, config: Path
) -> None:
    key = new_key(config, LIMITED)
    content = yaml.safe_load((config.parent / "keys.yaml").read_text())
    content["api_keys"][0]["tokens_per_minute"] = 60
    replace_private(config.parent / "keys.yaml", yaml.safe_dump(content))
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 30}
    with platform.http() as http:
        told = events({**body, "stream_options": {"include_usage": True}}, http.post)[-1]["usage"]
    with platform.http(key) as http:
        limit = None
        while limit is None:
            one = {"model": HOT, "prompt": "a", "max_tokens": 1}
            limit = http.post("/v1/completions", json=one).headers.get("x-ratelimit-limit-tokens")
        assert limit == "60"
        before = platform.metric("loomserve_key_tokens_total", key=LIMITED)
        seen = events(body, http.post)
        used = platform.metric("loomserve_key_tokens_total", key=LIMITED) - before
        refused = http.post(CHAT, json={"model": HOT, **body})
        assert http.get("/v1/models").status_code == 200
    assert used == told["total_tokens"]
    assert all(event["choices"] and "usage" not in event for event in seen)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "token_limit_exceeded"
    # All but the bucket's ten tokens come back at one a second.
    assert int(refused.headers["retry-after"]) >= told["total_tokens"] - 30


def test_the_prompt_of_a_beam_search_is_charged_once(platform: Platform, config: Path) -> None:
    name = "searches"
    key = new_key(config, name)
    noticed(platform, key, 200)
    before = platform.metric("loomserve_key_tokens_total", key=name, kind="prompt")
    body = {"model": HOT, "prompt": new_prompt(), "max_tokens": 4, "n": 2, "use_beam_search": True}
    with platform.http(key) as http:
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
    assert len(answer["choices"]) == 2
    after = platform.metric("loomserve_key_tokens_total", key=name, kind="prompt")
    assert after - before == answer["usage"]["prompt_tokens"]


def test_usage_is_shown_under_the_keys_name_and_kept(platform: Platform, config: Path) -> None:
    name = "accounted"
    key = new_key(config, name)
    noticed(platform, key, 200)
    prompt = new_prompt()
    body = {"model": HOT, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    began = datetime.now(UTC).isoformat(timespec="minutes")
    with platform.http(key) as http:
        told = [
            http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            for _ in range(2)
        ]
        # It does not tell its usage, and nobody reads it to its end.
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            next(response.iter_text())

    def shown() -> dict[str, Any]:
        query = {"from": began, "by": "key,model"}
        with platform.admin() as admin:
            found = admin.get("/admin/v1/usage", params=query).raise_for_status().json()["usage"]
        return next((each for each in found if each["key"] == name), {"requests": 0})

    deadline_s = time.monotonic() + PATIENCE_S
    while (used := shown())["requests"] < 3:
        assert time.monotonic() < deadline_s, used
        time.sleep(0.2)
    assert used["model"] == HOT
    assert used["prompt_tokens"] == 3 * told[0]["prompt_tokens"]
    assert used["completion_tokens"] - sum(each["completion_tokens"] for each in told) in range(
        1, 9
    )
    assert used["cached_tokens"] >= TOKENS_A_BLOCK, "of the second and third request"
    assert used["device_seconds"] > 0
    counted = platform.metric("loomserve_usage_tokens_total", key=name, model=HOT)
    assert counted == used["prompt_tokens"] + used["completion_tokens"]
    assert platform.metric("loomserve_key_tokens_total", key=name) == counted
    kept = "".join(path.read_text() for path in (config.parent / "usage").glob("*.jsonl"))
    assert f'"{name}"' in kept
    assert key not in kept

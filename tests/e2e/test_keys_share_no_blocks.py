"""API keys share no KV block, whichever way they ask."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import HOT, Platform
from tests.e2e.test_batch import ended, line, lines_of, submit
from tests.e2e.test_keys import CHAT
from tests.e2e.test_kvstore import TOKENS_A_BLOCK, new_prompt

pytestmark = pytest.mark.e2e


def asks(prompt: str) -> dict[str, dict[str, Any]]:
    """A request to each endpoint whose prompt has KV blocks."""
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2}
    return {
        CHAT: chat,
        "/v1/completions": {"prompt": prompt, "max_tokens": 2},
        "/v1/responses": {"input": prompt, "max_output_tokens": 2},
        "/v1/messages": chat,
    }


def cached(usage: dict[str, Any]) -> int:
    """Tokens of the prompt that were not computed."""
    for details in ("prompt_tokens_details", "input_tokens_details"):
        if details in usage:
            return int((usage[details] or {}).get("cached_tokens") or 0)
    return int(usage.get("cache_read_input_tokens") or 0)


@pytest.mark.parametrize("path", asks(""))
def test_two_keys_share_no_block_at_any_endpoint(platform: Platform, path: str) -> None:
    body = {"model": HOT, "temperature": 0, **asks(new_prompt())[path]}

    def ask(key: str) -> int:
        with platform.http(key) as http:
            return cached(http.post(path, json=body).raise_for_status().json()["usage"])

    assert ask(platform.key) == 0
    assert ask(platform.key) >= TOKENS_A_BLOCK
    assert ask(platform.narrow_key) == 0


def test_a_batch_finds_the_blocks_of_its_own_key_alone(platform: Platform) -> None:
    prompt = new_prompt()
    body = {"model": HOT, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    with platform.http() as http:
        http.post("/v1/completions", json=body).raise_for_status()

    def of_batch(key: str) -> int:
        client = platform.client(key)
        lines = [line("x", "/v1/completions", prompt=prompt, max_tokens=2)]
        batch = ended(client, submit(client, lines, "/v1/completions"))
        answer = lines_of(client, batch.output_file_id)["x"]["response"]["body"]
        return cached(answer["usage"])

    assert of_batch(platform.narrow_key) == 0
    assert of_batch(platform.key) >= TOKENS_A_BLOCK

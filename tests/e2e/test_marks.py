"""What users write and their keys stay with them: no log, metric or process shows any of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import HOT, Platform
from tests.forks import descendants

pytestmark = pytest.mark.e2e
PROMPT = "xylophonemark"
WRONG_KEY = "lsk-wrongkeymark"
ROUNDS = 2


def requests() -> Iterator[tuple[str, bytes]]:
    """Paths and bodies: right, wrong in all kinds of fields, and no JSON at all."""
    chat = {"model": HOT, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    completion = {"model": HOT, "prompt": PROMPT, "max_tokens": 2}
    usual = {
        "/v1/chat/completions": chat,
        "/v1/completions": completion,
        "/v1/responses": {"model": HOT, "input": PROMPT, "max_output_tokens": 2},
        "/v1/messages": chat,
        "/v1/tokenize": completion,
        "/v1/embeddings": {"model": HOT, "input": PROMPT},
    }
    changes: tuple[dict[str, object], ...] = (
        {},
        {"stream": True},
        {"temperature": "hot"},
        {"n": -1},
        {"model": "fuzz"},
        {"cache_salt": PROMPT},
        {"user": PROMPT, "metadata": {"user_id": PROMPT}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": PROMPT}}},
        {"structured_outputs": {"regex": f"({PROMPT}"}},
        {"stop": [PROMPT] * 9},
        {"prompt": PROMPT * 2000, "input": PROMPT * 2000},
        {"messages": [{"role": "user", "content": PROMPT * 2000}]},
        {"messages": [{"role": PROMPT, "content": {PROMPT: PROMPT}}]},
        {"vllm_xargs": {"loomserve_deadline": PROMPT}},
    )
    for path, body in usual.items():
        for change in changes:
            yield path, json.dumps(body | change).encode()
        yield path, json.dumps(body).encode()[:-1]
        yield path, PROMPT.encode() + b"\xff"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": completion}
    wrong = {**line, "custom_id": PROMPT, "url": PROMPT}
    for lines in ([line], [line, wrong]):
        text = "".join(json.dumps(one) + "\n" for one in lines)
        yield "/v1/files", text.encode()


def keys(platform: Platform) -> tuple[str, ...]:
    own = (platform.key, platform.narrow_key, platform.limited_key)
    return (*own, platform.admin_token, WRONG_KEY)


def send(platform: Platform) -> None:
    with platform.http(platform.narrow_key) as http, platform.http(WRONG_KEY) as stranger:
        for _ in range(ROUNDS):
            for path, body in requests():
                if path == "/v1/files":
                    form = {"data": {"purpose": "batch"}, "files": {"file": ("f.jsonl", body)}}
                    file_id = http.post(path, **form).raise_for_status().json()["id"]
                    batch = {"input_file_id": file_id, "completion_window": "24h"}
                    http.post("/v1/batches", json=batch | {"endpoint": "/v1/completions"})
                    continue
                headers = {"content-type": "application/json"}
                answer = http.post(path, content=body, headers=headers)
                assert answer.status_code < 500, answer.text
                refused = stranger.post(path, content=body, headers=headers)
                assert refused.status_code == 401
                assert PROMPT not in refused.text
                assert not any(key in answer.text + refused.text for key in keys(platform))
        stranger.put(f"/admin/v1/models/{HOT}/replicas", json={"replicas": 9})


def shown(platform: Platform) -> Iterator[tuple[str, bytes]]:
    """All that operators and other users of the machine may see, by where it stands."""
    processes = [platform.process, *descendants(platform.process)]
    for process in processes:
        yield f"arguments of {process.name()}", " ".join(process.cmdline()).encode()
    (raylet,) = (each for each in processes if each.name() == "raylet")
    (session,) = {
        argument.partition("=")[2]
        for argument in raylet.cmdline()
        if argument.startswith("--session_dir=")
    }
    logs = [path for path in Path(session, "logs").rglob("*") if path.is_file()]
    assert len(logs) > 10
    for path in [platform.log, platform.log.parent / "audit.log", *logs]:
        yield str(path), path.read_bytes()
    with platform.admin() as admin:
        for path in ("/metrics", "/admin/v1/state", "/admin/v1/kv", "/admin/v1/batches"):
            yield path, admin.get(path).raise_for_status().content
    yield "/ready", httpx.get(f"{platform.url}/ready").content


def test_prompts_and_keys_are_in_no_log_metric_or_argument(platform: Platform) -> None:
    send(platform)
    marks = [mark.encode() for mark in (PROMPT, *keys(platform))]
    found = [(place, mark) for place, text in shown(platform) for mark in marks if mark in text]
    assert not found

"""The batch lane through OpenAI's client: good and bad lines, keys, cancelling, a killed lane."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.conftest import COLD, HOT, Platform
from tests.e2e.test_admin import wait_for
from tests.e2e.test_kvstore import command
from tests.forks import descendants
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def line(custom_id: str, url: str = CHAT, model: str = HOT, **body: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": f"Tell me of {custom_id}."}
    if url == CHAT:
        asked = {"messages": [{"role": "user", "content": f"Tell me of {custom_id}."}]}
    body = {"model": model, "max_tokens": 4, "temperature": 0, **asked, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def submit(
    client: openai.OpenAI, lines: list[dict[str, Any]], endpoint: str = CHAT, **given: Any
) -> str:
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(text)), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(text), "in.jsonl", "batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **given
    )
    assert batch.status == "validating"
    return batch.id


def ended(client: openai.OpenAI, batch_id: str, timeout_s: float = 60) -> Any:
    wait_for(lambda: client.batches.retrieve(batch_id).status in ENDED, timeout_s)
    return client.batches.retrieve(batch_id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    text = client.files.content(file_id).text
    found = [json.loads(one) for one in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "a line was answered twice"
    return {one["custom_id"]: one for one in found}


def processes(platform: Platform, of: str) -> list[psutil.Process]:
    found = []
    for child in descendants(platform.process):
        with suppress(psutil.NoSuchProcess):
            if of in " ".join(child.cmdline()[:1]):
                found.append(child)
    return found


def lane_process(platform: Platform) -> psutil.Process:
    (lane,) = processes(platform, "BatchLane")
    return lane


def test_a_batch_answers_good_lines_and_says_what_is_wrong_with_bad_ones(
    platform: Platform,
) -> None:
    client = platform.client()
    lines = [line(f"good-{n}") for n in range(6)]
    lines += [
        line("other-model", model=COLD),
        line("no-such-model", model="gpt-9"),
        line("bad-parameter", temperature="hot"),
        line("too-long", max_tokens=5000),
        line("streams", stream=True),
    ]
    batch = ended(client, submit(client, lines, metadata={"job": "nightly"}))
    assert batch.status == "completed", batch
    assert batch.metadata == {"job": "nightly"}
    assert (batch.request_counts.total, batch.request_counts.completed) == (11, 7)
    assert batch.request_counts.failed == 4
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 7 * 4
    good = lines_of(client, batch.output_file_id)
    assert set(good) == {f"good-{n}" for n in range(6)} | {"other-model"}
    for answer in good.values():
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        assert answer["response"]["body"]["usage"]["completion_tokens"] <= 4
    online = client.chat.completions.create(**line("good-0")["body"])
    said = good["good-0"]["response"]["body"]["choices"][0]["message"]["content"]
    assert said == online.choices[0].message.content
    bad = lines_of(client, batch.error_file_id)
    assert {name: one["response"]["status_code"] for name, one in bad.items()} == {
        "no-such-model": 404,
        "bad-parameter": 400,
        "too-long": 400,
        "streams": 400,
    }
    assert all(one["response"]["body"]["error"]["message"] for one in bad.values())
    assert batch.id in [one.id for one in client.batches.list(limit=1)]


def test_a_file_that_is_wrong_fails_the_batch_and_says_where(platform: Platform) -> None:
    client = platform.client()
    lines = [line("a"), line("a"), line("b", COMPLETIONS), {"custom_id": "c"}]
    batch = ended(client, submit(client, lines))
    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_url"),
        (4, "missing_required_parameter"),
    ]


def test_files_are_listed_read_and_deleted_by_their_own_key_only(platform: Platform) -> None:
    client, other = platform.client(), platform.client(platform.narrow_key)
    file = client.files.create(file=("x.jsonl", b"{}"), purpose="batch")
    assert client.files.retrieve(file.id).status == "processed"
    assert client.files.content(file.id).content == b"{}"
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    for ask in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(file.id)
    assert file.id not in [one.id for one in other.files.list()]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        client.files.retrieve(file.id)


def test_a_keys_models_are_its_batches_models_too(platform: Platform) -> None:
    client = platform.client(platform.narrow_key)
    batch = ended(client, submit(client, [line("mine"), line("not-mine", model=COLD)]))
    assert set(lines_of(client, batch.output_file_id)) == {"mine"}
    (refused,) = lines_of(client, batch.error_file_id).values()
    assert refused["response"]["status_code"] == 403
    with pytest.raises(openai.NotFoundError):
        platform.client().batches.retrieve(batch.id)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
)
def test_a_wrong_batch_is_refused_with_the_field(
    platform: Platform, wrong: dict[str, Any], param: str
) -> None:
    client = platform.client()
    file = client.files.create(file=("x.jsonl", b"{}"), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **wrong}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**given)
    assert refused.value.param == param


def test_uploads_have_bounds(platform: Platform) -> None:
    client = platform.client()
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("x.jsonl", b"x" * (2 * 2**20 + 1)), purpose="batch")
    assert refused.value.status_code == 413
    # Larger than server.max_body, which is for requests that are held in memory.
    assert client.files.create(file=("x.jsonl", b"x" * 2 * 2**20), purpose="batch").bytes == 2**21
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x.jsonl", b"{}"), purpose="fine-tune")
    with platform.http() as http:
        assert http.post("/v1/files", content=b"no form").status_code == 400
        assert httpx.get(f"{platform.url}/v1/files").status_code == 401


def test_a_cancelled_batch_keeps_what_was_answered(platform: Platform) -> None:
    client = platform.client()
    # More than are answered while the command starts, where others have the cores.
    lines = [line(f"c-{n}", max_tokens=100, ignore_eos=True) for n in range(900)]
    batch_id = submit(client, lines)
    wait_for(lambda: shown(platform, batch_id)["in_flight"] > 0, 30)
    assert "being cancelled" in command(platform, "batch", "cancel", batch_id)
    batch = ended(client, batch_id)
    assert batch.status == "cancelled"
    good, bad = (lines_of(client, name) for name in (batch.output_file_id, batch.error_file_id))
    assert len(good) + len(bad) == len(lines)
    assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="cancelled"):
        client.batches.cancel(batch_id)
    wait_for(lambda: not running(platform), 10)


def test_a_killed_lane_goes_on_where_it_was_and_online_requests_do_not_notice(
    platform: Platform,
) -> None:
    client = platform.client()
    lines = [line(f"k-{n}", max_tokens=16, ignore_eos=True) for n in range(40)]
    batch_id = submit(client, lines)
    wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed > 5, 60)
    lane = lane_process(platform)
    lane.kill()
    began = time.monotonic()
    client.chat.completions.create(**line("online")["body"])
    assert time.monotonic() - began < PATIENCE_S
    batch = again(lambda: ended(client, batch_id))
    assert lane_process(platform).pid != lane.pid
    assert batch.status == "completed"
    assert set(lines_of(client, batch.output_file_id)) == {one["custom_id"] for one in lines}
    assert batch.id in command(platform, "batch", "show", batch.id)
    assert platform.metric("loomserve_batch_up") == 1
    assert platform.metric("loomserve_batch_batches", status="completed") >= 1


def again(ask: Callable[[], Any]) -> Any:
    """What is answered once the lane is back."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except openai.InternalServerError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def shown(platform: Platform, batch_id: str) -> dict[str, Any]:
    with platform.admin() as admin:
        return dict(admin.get(f"/admin/v1/batches/{batch_id}").raise_for_status().json())


def running(platform: Platform) -> int:
    models: Any = platform.state()["models"]
    return sum(r["load"]["running"] for model in models for r in model["replicas"])

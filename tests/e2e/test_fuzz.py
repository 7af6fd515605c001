"""Thousands of random requests to all endpoints: none is answered 5xx, hangs, or ends an engine."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import httpx
import pytest

from tests.e2e.conftest import HOT, Platform
from tests.e2e.fuzz import Requests, Sent
from tests.forks import descendants

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]
SEED = "loomserve"
MANY = 10_000
FEW = 250
"""Of them; the ordinary run sends the first."""


def engines(platform: Platform) -> set[int]:
    return {
        child.pid
        for child in descendants(platform.process)
        if "EngineCore" in " ".join(child.cmdline())
    }


def failure(client: httpx.Client, sent: Sent) -> str | None:
    """What the platform itself did wrong, in one line."""
    request = client.build_request(
        sent.method, sent.path, content=sent.content or None, headers=sent.headers
    )
    try:
        try:
            answer = client.send(request)
        except (httpx.RemoteProtocolError, httpx.NetworkError):
            # A kept connection that the server was just closing.
            answer = client.send(request)
    except httpx.TransportError as error:
        return f"no answer: {error!r}"
    if answer.status_code >= 500:
        return f"{answer.status_code} {answer.text[:300]}"
    if "text/event-stream" in answer.headers.get("content-type", ""):
        for line in answer.text.splitlines():
            data = line.removeprefix("data: ")
            if data.startswith(('{"error"', '{"type": "error"')):
                kind = json.loads(data)["error"]["type"]
                if kind in ("server_error", "api_error"):
                    return data
    return None


def send(platform: Platform, numbers: range) -> dict[str, list[int]]:
    """The numbers of the requests that found a fault, by operation and fault."""
    faults: defaultdict[str, list[int]] = defaultdict(list)
    with platform.admin() as admin, platform.http(platform.narrow_key) as client:
        # What was to end an answer soon may be spoiled: it is as long as the context then.
        client.timeout = httpx.Timeout(240)
        openapi = admin.get("/admin/v1/openapi.json").raise_for_status().json()
        requests = Requests(openapi, HOT, SEED)
        for number in numbers:
            sent = requests.made(number)
            # Now and then without the right token.
            to_admin = sent.path.startswith("/admin") and number % 10 != 0
            fault = failure(admin if to_admin else client, sent)
            if fault is not None:
                faults[f"{sent.operation}: {fault}"].append(number)
    return faults


def check(platform: Platform, numbers: range) -> None:
    before = engines(platform)
    faults = send(platform, numbers)
    told = (f"{fault} (requests {found[:5]})" for fault, found in faults.items())
    assert not faults, "\n".join(itertools.islice(told, 50))
    assert engines(platform) == before
    with platform.http() as http:
        body = {"model": HOT, "prompt": "Once upon a time", "max_tokens": 4}
        assert http.post("/v1/completions", json=body).status_code == 200


def test_random_requests_find_no_fault(platform: Platform) -> None:
    check(platform, range(FEW))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_random_requests_find_no_fault(platform: Platform) -> None:
    check(platform, range(FEW, MANY))

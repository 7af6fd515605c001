"""Two processes that take requests at one address, over the same engines."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import HOT, Platform, simulated_config, started
from tests.e2e.test_admin import model_state, wait_for
from tests.forks import descendants
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

STREAMS = 8
TOKENS = 160
RATE = 30
BURST = 5


def two_config(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    config = simulated_config(port, hashes)
    config["models"] = [model for model in config["models"] if model["name"] == HOT]
    del config["batch"], config["rebalancing"]
    config["server"]["front_ends"] = 2
    config["server"]["api_keys"] = [
        {"name": "all", "hash": hashes[0]},
        {"name": "limited", "hash": hashes[1], "requests_per_minute": RATE},
        {"name": "narrow", "hash": hashes[3], "max_concurrent": 3},
    ]
    return config


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """In the place of the one that other tests share."""
    with started(tmp_path_factory.mktemp("two"), two_config) as running:
        wait_for(lambda: len(gateways(running)) == 2, 60)
        yield running


def gateways(platform: Platform) -> list[psutil.Process]:
    """The processes that listen at the server's address."""
    port = int(platform.url.rpartition(":")[2])
    return [each for each in descendants(platform.process) if listens(each, port)]


def listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def has(process: psutil.Process, client_port: int) -> bool:
    return any(
        c.raddr and c.raddr.port == client_port and c.status == psutil.CONN_ESTABLISHED
        for c in process.net_connections("tcp")
    )


def connected(platform: Platform, to: psutil.Process, stack: ExitStack, token: str) -> httpx.Client:
    """A client whose one connection the kernel has given to this gateway."""
    for _ in range(100):
        client = platform.http(token)
        with client.stream("GET", "/health") as response:
            response.read()
            stream = response.extensions["network_stream"]
            client_port = stream.get_extra_info("client_addr")[1]
        if has(to, client_port):
            stack.callback(client.close)
            return client
        client.close()
    raise AssertionError("no connection went there")


class Stream:
    """A stream on a connection, with its text so far."""

    def __init__(self, client: httpx.Client, index: int) -> None:
        self.text = ""
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(client, index))
        self._thread.start()

    def _run(self, client: httpx.Client, index: int) -> None:
        body = {
            "model": HOT,
            "prompt": f"Story number {index}. Once upon a time",
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        try:
            with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.text += json.loads(line[6:])["choices"][0]["text"]
        except httpx.HTTPError as error:
            self.error = error

    def finish(self) -> str:
        self._thread.join(180)
        assert not self._thread.is_alive()
        return self.text


def streams(platform: Platform, stack: ExitStack) -> list[list[Stream]]:
    """Eight on each gateway."""
    clients = [
        [connected(platform, to, stack, platform.key) for _ in range(STREAMS)]
        for to in gateways(platform)
    ]
    return [[Stream(client, index) for index, client in enumerate(of_one)] for of_one in clients]


def in_flight(platform: Platform) -> int:
    return sum(one["in_flight"] for one in model_state(platform, HOT)["replicas"])


def samples(page: str, name: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if line.startswith(name + "{")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture(scope="module")
def undisturbed(platform: Platform) -> list[str]:
    with ExitStack() as stack:
        one, two = streams(platform, stack)
        texts = [each.finish() for each in one]
        assert [each.finish() for each in two] == texts
        assert not [each for each in (*one, *two) if each.error]
        return texts


def test_either_shows_the_metrics_of_both(platform: Platform, undisturbed: list[str]) -> None:
    with ExitStack() as stack:
        pages = [
            connected(platform, to, stack, platform.admin_token).get("/metrics").text
            for to in gateways(platform)
        ]
    answered = {'endpoint="/v1/completions"', 'status="200"'}
    for page in pages:
        of_both = {
            label: value
            for label, value in samples(page, "loomserve_requests_total").items()
            if all(each in label for each in answered)
        }
        assert sorted(of_both.values()) == [STREAMS, STREAMS]
        assert {label.count("front_end=") for label in of_both} == {1}
        tokens = samples(page, "vllm:generation_tokens_total")
        # First each engine answered one of a gateway, or of both, with a token.
        assert 2 <= sum(tokens.values()) - 2 * STREAMS * TOKENS <= len(tokens)
        running = samples(page, "vllm:num_requests_running")
        assert len(running) == 2
        assert sum(running.values()) == 0


def test_a_keys_rate_holds_over_both(platform: Platform) -> None:
    with ExitStack() as stack:
        clients = [
            connected(platform, to, stack, platform.limited_key) for to in gateways(platform)
        ]
        began = time.monotonic()
        statuses = [[client.get("/v1/models").status_code for client in clients] for _ in range(10)]
        earned = int((time.monotonic() - began) * RATE / 60) + 1
        of_one, of_two = ([pair[n] for pair in statuses].count(200) for n in range(2))
        assert BURST <= of_one + of_two <= BURST + earned
        assert min(of_one, of_two) > 0
        assert {status for pair in statuses for status in pair} == {200, 429}


def test_a_keys_concurrency_holds_over_both(platform: Platform) -> None:
    def ask(client: httpx.Client) -> int:
        body = {"model": HOT, "prompt": "On", "max_tokens": 60, "ignore_eos": True}
        return client.post("/v1/completions", json=body).status_code

    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        clients = [
            connected(platform, to, stack, platform.narrow_key)
            for to in gateways(platform)
            for _ in range(4)
        ]
        statuses = list(pool.map(ask, clients))
    assert statuses.count(200) + statuses.count(429) == 8
    # One more for each further gateway, had they come in the very same microseconds.
    assert 3 <= statuses.count(200) <= 4


def test_both_know_of_a_changed_alias(platform: Platform) -> None:
    path, took = "/admin/v1/aliases/chat", []

    def shown(client: httpx.Client) -> Any:
        answer = client.get("/v1/models/chat")
        return answer.json()["models"] if answer.status_code == 200 else answer.status_code

    with ExitStack() as stack, platform.admin() as admin:
        clients = [connected(platform, to, stack, platform.key) for to in gateways(platform)]
        for value, expected in ((HOT, {HOT: 1}), ({HOT: 7}, {HOT: 7}), (None, 404)):
            request = {} if value is None else {"json": value}
            told = time.monotonic()
            admin.request("DELETE" if value is None else "PUT", path, **request).raise_for_status()
            while not all(shown(client) == expected for client in clients):
                assert time.monotonic() < told + PATIENCE_S
            took.append(time.monotonic() - told)
    print(f"{took=}")
    # A second is promised; a neighbour may delay some of them.
    assert min(took) < 2


def test_one_that_is_killed_takes_nothing_with_it_but_its_own_streams(
    platform: Platform, undisturbed: list[str]
) -> None:
    victim, other = gateways(platform)
    with ExitStack() as stack:
        lost, kept = streams(platform, stack)
        wait_for(lambda: all(len(each.text) > 40 for each in (*lost, *kept)), 60)
        wait_for(lambda: in_flight(platform) == 2 * STREAMS, 5)
        # Of all connections that are made, the half would come to it.
        victim.kill()
        killed_at = time.monotonic()
        took = []
        for _ in range(40):
            # Its sockets live as long as its last thread, whose files nobody sees any more.
            dying = psutil.pid_exists(victim.pid)
            began = time.monotonic()
            try:
                with platform.http() as http:
                    assert http.get("/health").status_code == 200
            except httpx.TransportError:
                # The kernel resets what it has given to one whose sockets it is about to close.
                if not dying:
                    raise
            took.append(time.monotonic() - began)
        # The half of them would wait at sockets that nobody takes from, and neighbours delay fewer.
        assert statistics.median(took) < 1
        wait_for(lambda: in_flight(platform) <= STREAMS, 5)
        aborted_s = time.monotonic() - killed_at
        assert [each.finish() for each in kept] == undisturbed
        assert not [each.error for each in kept if each.error]
        for each, whole in zip(lost, undisturbed, strict=True):
            each.finish()
            assert each.error is not None
            assert whole.startswith(each.text)
    wait_for(lambda: len(gateways(platform)) == 2, 120)
    print(
        f"new connections: {max(took) * 1000:.0f} ms at most; aborted after {aborted_s:.1f} s at "
        f"most; two again after {time.monotonic() - killed_at:.0f} s"
    )
    with ExitStack() as stack:
        again = streams(platform, stack)
        assert [[each.finish() for each in of_one] for of_one in again] == [undisturbed] * 2
    assert other in gateways(platform)


def test_a_drained_replica_is_left_by_both(platform: Platform, undisturbed: list[str]) -> None:
    with ExitStack() as stack, platform.admin() as admin:
        running = streams(platform, stack)
        wait_for(lambda: all(len(each.text) > 40 for one in running for each in one), 60)
        replicas: list[dict[str, Any]] = model_state(platform, HOT)["replicas"]
        path = f"/admin/v1/replicas/{replicas[0]['id']}/draining"
        admin.put(path, json={"draining": True}).raise_for_status()
        wait_for(
            lambda: (
                not next(
                    one["in_flight"]
                    for one in model_state(platform, HOT)["replicas"]
                    if one["id"] == replicas[0]["id"]
                )
            ),
            10,
        )
        assert [[each.finish() for each in of_one] for of_one in running] == [undisturbed] * 2
        admin.put(path, json={"draining": False}).raise_for_status()

"""A gateway on each of two nodes: limits over both, metrics of both, and a node that is drained."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from loomserve.platform.access.keys import new_key
from tests.cluster.cluster import MODEL, PORT, Cluster, Running, answers, cluster, until
from tests.cluster.nodes import network
from tests.e2e.conftest import Platform
from tests.e2e.test_two_gateways import samples
from tests.streams import differences, mixture

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

RATE, BURST, WIDTH = 30, 5, 3
TOKENS = 120
UP_S = 240.0


class TwoGateways:
    def __init__(self, running: Cluster) -> None:
        config = running.config()
        config["cluster"]["gateways"] = "each_node"
        config["server"] |= {"host": "0.0.0.0", "drain_timeout_s": 60}
        self.limited, limited = new_key()
        self.narrow, narrow = new_key()
        config["server"]["api_keys"] += [
            {"name": "limited", "hash": limited, "requests_per_minute": RATE},
            {"name": "narrow", "hash": narrow, "max_concurrent": WIDTH},
        ]
        self.cluster, self.nodes = running, running.nodes
        self.urls = [f"http://{node.machine.address}:{PORT}" for node in running.nodes]
        running.write(config)
        self.platform: Platform = running.serve()
        until(lambda: all(map(answers, self.urls)), UP_S, lambda: "a node has no gateway")

    def http(self, node: int, token: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token or self.platform.key}"}
        return httpx.Client(base_url=self.urls[node], headers=headers, timeout=180)

    def whole(self) -> bool:
        """Whether all nodes are up with a replica each, and take clients."""
        states = self.node_states().values()
        up = all(each["replicas"] == 1 and each["status"] == "up" for each in states)
        return up and all(map(answers, self.urls))

    def until_whole(self) -> None:
        until(self.whole, UP_S, lambda: f"{self.node_states()}\n{self.cluster.ray_logs()}")

    def take_back(self) -> None:
        with self.platform.admin() as admin:
            admin.request("DELETE", "/admin/v1/nodes/two/drain").raise_for_status()

    def node_states(self) -> dict[str, dict[str, Any]]:
        with self.platform.admin() as admin:
            nodes = admin.get("/admin/v1/nodes").raise_for_status().json()
        return {each["name"]: each for each in nodes}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoGateways]:
    with (
        network("one", "two") as machines,
        cluster(machines, tmp_path_factory.mktemp("gateways")) as running,
    ):
        yield TwoGateways(running)


def listens(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        httpx.get(f"{url}/ready", timeout=5)
        return True
    return False


def completion(client: httpx.Client, number: int = 0, tokens: int = 20) -> httpx.Response:
    body = {
        "model": MODEL,
        "prompt": f"Story number {number}. Once upon a time",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return client.post("/v1/completions", json=body)


def text(answer: httpx.Response) -> str:
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def test_both_answer_alike_and_each_node_is_told_of(two: TwoGateways) -> None:
    with two.http(0) as one, two.http(1) as other:
        assert [text(completion(one, n)) for n in range(3)] == [
            text(completion(other, n)) for n in range(3)
        ]
    until(lambda: {each["gateways"] for each in two.node_states().values()} == {1}, 30)
    states = two.node_states()
    assert set(states) == {"one", "two"}
    assert {each["status"] for each in states.values()} == {"up"}
    assert {each["replicas"] for each in states.values()} == {1}


def test_either_shows_the_metrics_of_both_and_each_engine_once(two: TwoGateways) -> None:
    with two.http(0) as one, two.http(1) as other:
        completion(one)
        completion(other)
    pages = []
    for url in two.urls:
        headers = {"Authorization": f"Bearer {two.platform.admin_token}"}
        pages.append(httpx.get(f"{url}/metrics", headers=headers, timeout=30).text)
    for page in pages:
        answered = [
            label
            for label in samples(page, "loomserve_requests_total")
            if 'endpoint="/v1/completions"' in label and 'status="200"' in label
        ]
        assert sorted(label.partition('node="')[2].partition('"')[0] for label in answered) == [
            "one", "two",
        ]  # fmt: skip
        running = samples(page, "vllm:num_requests_running")
        assert len(running) == 2
        assert {label.count('node="') for label in running} == {1}


def test_a_keys_rate_holds_over_both_nodes(two: TwoGateways) -> None:
    admitted = [0, 0]
    with two.http(0, two.limited) as one, two.http(1, two.limited) as other:
        began = time.monotonic()
        while time.monotonic() - began < 20:
            for node, client in enumerate((one, other)):
                admitted[node] += client.get("/v1/models").status_code == 200
            time.sleep(0.1)
        earned = (time.monotonic() - began) * RATE / 60
    # Each may begin with a small share, of half of an equal part, before it is told more.
    assert BURST <= sum(admitted) <= BURST + earned + 2 * max(1, BURST / 4) + 1
    assert sum(admitted) >= 0.7 * earned
    assert min(admitted) > 0


def test_a_keys_concurrency_holds_over_both_nodes(two: TwoGateways) -> None:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        clients = [
            stack.enter_context(two.http(node, two.narrow)) for node in (0, 1) for _ in range(4)
        ]
        # Both know of the key before what counts.
        for client in clients[::4]:
            completion(client, tokens=1)
        time.sleep(3)
        statuses = list(pool.map(lambda client: completion(client, tokens=TOKENS), clients))
    codes = [each.status_code for each in statuses]
    assert codes.count(200) + codes.count(429) == 8
    assert 1 <= codes.count(200) <= WIDTH


def test_a_node_that_is_drained_is_left_and_its_gateway_says_so(two: TwoGateways) -> None:
    with two.http(0) as one, two.http(1) as other, two.platform.admin() as admin:
        whole = text(completion(one, 7, TOKENS))
        refused = admin.post("/admin/v1/nodes/one/drain")
        assert refused.status_code == 409
        assert "what there is but once" in refused.json()["error"]["message"]
        assert admin.post("/admin/v1/nodes/three/drain").status_code == 404
        texts: dict[int, str] = {}
        threads = [
            threading.Thread(
                target=lambda n, c: texts.update({n: text(completion(c, 7, TOKENS))}),
                args=(n, client),
            )
            for n, client in enumerate((one, one, other, other))
        ]
        for thread in threads:
            thread.start()
        time.sleep(1)
        began = time.monotonic()
        assert admin.post("/admin/v1/nodes/two/drain").status_code == 202
        until(lambda: not answers(two.urls[1]), 5, lambda: "its gateway says that it is ready")
        assert answers(two.urls[0])
        for thread in threads:
            thread.join(180)
        assert texts == dict.fromkeys(range(4), whole)
        until(lambda: two.node_states()["two"]["status"] == "drained", 120)
        print(f"drained after {time.monotonic() - began:.0f} s")
        assert text(completion(one, 7, TOKENS)) == whole
        two.take_back()


def test_a_drain_taken_back_as_the_node_is_left_begins_nothing_there_that_ends_with_it(
    two: TwoGateways,
) -> None:
    two.until_whole()
    joined = two.nodes[1].said.count(" is up at ")
    with two.platform.admin() as admin:
        assert admin.post("/admin/v1/nodes/two/drain").status_code == 202
    # Ray is told to leave the node in the same breath.
    until(lambda: not listens(two.urls[1]), 120, lambda: "its gateway does not end")
    two.take_back()
    assert two.node_states()["two"]["status"] in ("draining", "down")
    two.until_whole()
    assert two.nodes[1].said.count(" is up at ") == joined + 1
    with two.http(0) as one, two.http(1) as other:
        assert text(completion(other, 7, TOKENS)) == text(completion(one, 7, TOKENS))


def test_without_its_head_the_other_node_answers_until_the_head_is_back(two: TwoGateways) -> None:
    two.until_whole()
    asked = list(mixture(MODEL, 8, TOKENS, 0, 1))
    expected = Running(two.urls[1], two.platform.key, asked).answers()
    running = Running(two.urls[1], two.platform.key, asked)
    running.reach(10)
    head = two.nodes[0]
    head.machine.cut_power()
    cut_at = time.monotonic()
    assert differences(expected, running.answers()) == {}
    # Those that begin while there is no head.
    assert differences(expected, Running(two.urls[1], two.platform.key, asked).answers()) == {}
    head.machine.boot()
    head.start()
    up_s = time.monotonic() - cut_at
    until(lambda: answers(two.urls[0]), UP_S, head.ray_logs)
    two.until_whole()
    print(
        f"the head was back after {up_s:.0f} s, all replicas after {time.monotonic() - cut_at:.0f}"
    )
    for url in two.urls:
        assert differences(expected, Running(url, two.platform.key, asked).answers()) == {}

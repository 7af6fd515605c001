"""One model with a replica on each of two nodes: what clients see, and what is seen of it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import zmq

from loomserve.platform.engine.core.addresses import HELLO
from tests.cluster.cluster import MODEL, PORT, Cluster, Running, until
from tests.cluster.nodes import Node
from tests.e2e.conftest import Platform
from tests.streams import Answer, Asked, differences, mixture

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS, TOKENS = 11, 80
BACK_S = 300.0
CUT_OFF_S = 60.0
LISTENING = """
import psutil
for one in psutil.net_connections("inet"):
    if one.status == psutil.CONN_LISTEN:
        print(one.laddr.ip, one.laddr.port, " ".join(psutil.Process(one.pid).cmdline())[:100])
"""
ZMQ_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
OTHER_TOKEN = """
import os, sys
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
"""
GCS_WITH_OTHER_TOKEN = f"""{OTHER_TOKEN}
from ray._raylet import GcsClient
try:
    print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)), "nodes seen")
except Exception as error:
    print("refused:", error)
"""
CLIENT_WITH_OTHER_TOKEN = f"""{OTHER_TOKEN}
import ray
try:
    ray.init("ray://" + sys.argv[1].replace(":6379", ":10001"))
    print("connected")
except Exception as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def platform(two_nodes: Cluster) -> Platform:
    two_nodes.write(two_nodes.config())
    return two_nodes.serve()


def replicas(platform: Platform) -> dict[str, dict[str, Any]]:
    """By device."""
    with platform.admin() as admin:
        (model,) = admin.get("/admin/v1/state").raise_for_status().json()["models"]
    return {each["device"]: each for each in model["replicas"]}


def whole(platform: Platform) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return len(replicas(platform)) == 2
    return False


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return list(mixture(MODEL, REQUESTS, TOKENS, 0, 1))


@contextlib.contextmanager
def drained(platform: Platform, device: str) -> Iterator[None]:
    path = f"/admin/v1/replicas/{replicas(platform)[device]['id']}/draining"
    with platform.admin() as admin:
        admin.put(path, json={"draining": True}).raise_for_status()
        time.sleep(4)  # all know of it with the second heartbeat
        yield
        admin.put(path, json={"draining": False}).raise_for_status()
    time.sleep(4)


@pytest.fixture(scope="module")
def expected(platform: Platform, asked: list[Asked]) -> list[Answer]:
    """From the engine on the gateway's own node, over Unix sockets."""
    with drained(platform, "core1"):
        return Running(platform.url, platform.key, asked).answers()


def test_each_node_has_the_replica_of_its_device(platform: Platform, two_nodes: Cluster) -> None:
    there = replicas(platform)
    for device, node in zip(("core0", "core1"), two_nodes.nodes, strict=True):
        assert node.machine.address in there[device]["address"]
        engines = [
            one for one in node.machine.processes() if "EngineCore" in " ".join(one.cmdline())
        ]
        assert len(engines) == 1


def test_an_engine_on_another_node_gives_the_same_tokens(
    platform: Platform, asked: list[Asked], expected: list[Answer]
) -> None:
    with drained(platform, "core0"):
        assert differences(expected, Running(platform.url, platform.key, asked).answers()) == {}


def test_both_nodes_get_requests_and_tell_their_loads(
    platform: Platform, asked: list[Asked], expected: list[Answer]
) -> None:
    running = Running(platform.url, platform.key, asked)
    most = {"core0": 0, "core1": 0}
    while not running.load.ended.is_set():
        for device, replica in replicas(platform).items():
            most[device] = max(most[device], replica["load"]["running"])
        time.sleep(0.2)
    assert differences(expected, running.answers()) == {}
    assert min(most.values()) > 0, most
    assert len(platform.samples("vllm:num_requests_running", model=MODEL)) >= 2


def listening(node: Node) -> list[tuple[str, int, str]]:
    """Address, port and process of whatever listens there beyond loopback."""
    page = node.output(sys.executable, "-c", LISTENING)
    found = [line.split(maxsplit=2) for line in page.splitlines()]
    return [
        (ip, int(port), title)
        for ip, port, title in found
        if not ip.removeprefix("::ffff:").startswith("127.") and ip != "::1"
    ]


def test_nothing_on_any_node_answers_who_has_no_key_or_token(
    platform: Platform, two_nodes: Cluster
) -> None:
    for node in (each.machine for each in two_nodes.nodes):
        there = listening(node)
        assert len(there) > 5, "nothing was looked at"
        engines = [ip for ip, _, title in there if "EngineCore" in title]
        assert len(engines) == 2
        assert set(engines) == {node.address}
        open_to_all = [
            (port, title)
            for _, port, title in there
            if port != PORT
            and (
                answers_http(node.address, port)
                or (speaks_zmq(node.address, port) and answers_zmq(node.address, port))
            )
        ]
        assert open_to_all == []
    gcs = two_nodes.head.head
    worker = two_nodes.nodes[1].machine
    for script in (GCS_WITH_OTHER_TOKEN, CLIENT_WITH_OTHER_TOKEN):
        assert "refused" in worker.output(sys.executable, "-c", script, gcs)


def answers_http(host: str, port: int) -> bool:
    """Whether a page comes, over HTTP or HTTPS, of whoever listens there."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    for context in (None, anyone):
        with contextlib.suppress(OSError):
            plain = socket.create_connection((host, port), timeout=1)
            with context.wrap_socket(plain) if context else plain as connection:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                connection.settimeout(1)
                said = connection.recv(100)
                if said.startswith(b"HTTP/1.1 2"):
                    return True
    return False


def answers_zmq(host: str, port: int) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://{host}:{port}")
        asking.send_multipart([HELLO, b"x"])
        return bool(asking.poll(500))


def speaks_zmq(host: str, port: int) -> bool:
    """To the oldest of ZMQ's protocols, what an HTTP server says is a message, too."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout=1) as connection,
    ):
        connection.sendall(ZMQ_SIGNATURE)
        connection.settimeout(1)
        said = connection.recv(len(ZMQ_SIGNATURE))
        return said[:1] == ZMQ_SIGNATURE[:1] and said[9:] == ZMQ_SIGNATURE[9:]
    return False


def test_a_node_without_power_costs_no_stream_and_no_request_and_comes_back(
    platform: Platform, two_nodes: Cluster, asked: list[Asked], expected: list[Answer]
) -> None:
    until(lambda: whole(platform), BACK_S, two_nodes.ray_logs)
    lost = two_nodes.nodes[1]
    running = Running(platform.url, platform.key, asked)
    running.reach(10)
    assert platform.in_flight(MODEL, replicas(platform)["core1"]["id"]) > 0
    lost.machine.cut_power()
    assert differences(expected, running.answers()) == {}
    # Those that begin while the node is away.
    assert differences(expected, Running(platform.url, platform.key, asked).answers()) == {}
    lost.machine.boot()
    lost.start()
    until(lambda: whole(platform), BACK_S, two_nodes.ray_logs)
    with drained(platform, "core0"):
        assert differences(expected, Running(platform.url, platform.key, asked).answers()) == {}


def test_a_node_that_was_cut_off_joins_again_by_itself(
    platform: Platform, two_nodes: Cluster, asked: list[Asked], expected: list[Answer]
) -> None:
    until(lambda: whole(platform), BACK_S, two_nodes.ray_logs)
    apart = two_nodes.nodes[1]
    before = apart.machine.processes()
    running = Running(platform.url, platform.key, asked)
    running.reach(10)
    apart.machine.partition()
    assert differences(expected, running.answers()) == {}
    # Long enough for the head to give the node up.
    time.sleep(CUT_OFF_S)
    assert not whole(platform)
    apart.machine.heal()
    apart.until_up()
    engines = [one for one in before if one.is_running() and "Engine" in _title(one)]
    assert engines == [], "they would serve for a cluster that has given them up"
    until(lambda: whole(platform), BACK_S, two_nodes.ray_logs)
    with drained(platform, "core0"):
        assert differences(expected, Running(platform.url, platform.key, asked).answers()) == {}


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def test_a_platform_outlives_its_serve_command_until_the_next_takes_its_place(
    platform: Platform, two_nodes: Cluster, asked: list[Asked], expected: list[Answer]
) -> None:
    until(lambda: whole(platform), BACK_S, two_nodes.ray_logs)
    before = {replica["id"] for replica in replicas(platform).values()}
    two_nodes.kill_serve()
    assert differences(expected, Running(platform.url, platform.key, asked).answers()) == {}
    again = two_nodes.serve()
    assert "an earlier loomserve serve" in two_nodes.log.read_text()
    assert not before & {replica["id"] for replica in replicas(again).values()}
    assert differences(expected, Running(again.url, again.key, asked).answers()) == {}


def test_the_end_of_serve_ends_what_it_deployed_and_leaves_the_nodes(
    platform: Platform, two_nodes: Cluster
) -> None:
    raylets = [one for one in two_nodes.head.machine.processes() if "raylet" in one.name()]
    assert two_nodes.end_serve() == 0, two_nodes.log.read_text()[-2000:]
    assert all(one.is_running() for one in raylets)
    for node in two_nodes.nodes:
        titles = list(map(_title, node.machine.processes()))
        assert not [title for title in titles if "Engine" in title or "ServeReplica" in title]
        assert node.supervisor is not None
        assert node.supervisor.poll() is None

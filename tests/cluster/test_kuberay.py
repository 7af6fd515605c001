"""A RayService as the chart renders it, on a real Ray, by the REST calls that KubeRay makes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import yaml

from loomserve.platform.access.keys import new_key
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config.loader import parse
from loomserve.platform.fleet.messages import BATCH_APP, MODEL_APP_PREFIX, READY_APP, gateway_app
from loomserve.platform.kubernetes.commands import values_file
from loomserve.platform.kubernetes.values import derived_values
from tests.cluster.cluster import MODEL, PORT, READY_S, until
from tests.cluster.kuberay import Operator, Pod, ray_cluster
from tests.cluster.nodes import network
from tests.e2e.conftest import ENGINE
from tests.unit.kubernetes.chart import Manifest, merged, only, render

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

KEY, KEY_HASH = new_key()
DRAIN_S = 20
SLACK_S = 3
LONG_STREAMS = 4
"""Which one core takes longer for than a gateway waits."""


def config(**server: Any) -> str:
    return yaml.safe_dump(
        {
            "cluster": {"gateways": "each_node"},
            "devices": [{"name": "core0", "cores": [0], "node": "one"}],
            "models": [
                {
                    "name": MODEL,
                    "source": "demo",
                    "devices": ["core0"],
                    "replicas": 1,
                    "kv_cache_memory": "256MiB",
                    "engine": ENGINE,
                }
            ],
            "kvstore": {"memory": "64MiB"},
            "batch": {},
            "server": {
                "host": "0.0.0.0",
                "port": PORT,
                "drain_timeout_s": DRAIN_S,
                "api_keys": [{"name": "all", "hash": KEY_HASH}],
                **server,
            },
        }
    )


def manifests(text: str) -> list[Manifest]:
    derived = derived_values(text, parse(text), {MODEL: 270 * 10**6})
    image = {"image": {"repository": "registry.example.com/loomserve", "tag": "0.1.0"}}
    return render(merged(yaml.safe_load(values_file(text, derived)), image))


def serve_config(rendered: list[Manifest], pod: Pod) -> str:
    return pod.here(only(rendered, "RayService")["spec"]["serveConfigV2"])


class Cluster:
    def __init__(self, pods: tuple[Pod, ...], rendered: list[Manifest]) -> None:
        self.head, self.worker = pods
        self.rendered = rendered
        self.operator = Operator(self.head.machine)
        admin = only(rendered, "Secret", "loom-tokens")["stringData"]["admin-token"]
        self.admin = {"Authorization": f"Bearer {admin}"}

    def url(self, pod: Pod) -> str:
        return f"http://{pod.machine.address}:{PORT}"

    def probe(self, pod: Pod) -> tuple[int, str]:
        """What Kubernetes hears; 0: nobody listens."""
        try:
            answer = httpx.get(f"{self.url(pod)}/-/healthz", timeout=5)
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.text

    def state(self) -> dict[str, Any]:
        """By the head's gateway, as operators ask."""
        answer = httpx.get(f"{self.url(self.head)}/admin/v1/state", headers=self.admin, timeout=20)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def ask(self, tokens: int, **more: Any) -> httpx.Response:
        with self._asking(tokens, **more) as answer:
            answer.read()
        return answer

    def stream(self, tokens: int) -> AbstractContextManager[httpx.Response]:
        return self._asking(tokens, stream=True)

    def _asking(self, tokens: int, **more: Any) -> AbstractContextManager[httpx.Response]:
        body = {"model": MODEL, "prompt": "One, two,", "max_tokens": tokens, "temperature": 0}
        return httpx.stream(
            "POST",
            f"{self.url(self.worker)}/v1/completions",
            json=body | {"ignore_eos": True} | more,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=120,
        )

    def why_not(self) -> str:
        logs = [
            f"--- {pod.machine.name}\n{pod.log.read_text()[-6000:]}"
            for pod in (self.head, self.worker)
        ]
        try:
            said = {
                name: (app["status"], app["message"])
                for name, app in self.operator.applications().items()
            }
        except httpx.HTTPError as error:
            said = {"": repr(error)}
        script = f"tail -n 25 {self.head.machine.temporary}/ray/session_latest/logs/serve/*.log"
        logs += [
            pod.machine.output("sh", "-c", f"{script} || true") for pod in (self.head, self.worker)
        ]
        return "\n".join([str(said), *logs])


def claim(folder: Path) -> Path:
    """A folder for pods, with a claim that has models already."""
    models = cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "lib/home").mkdir(parents=True)
    (folder / "lib/home/models").symlink_to(models)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    rendered = manifests(config())
    folder = claim(tmp_path_factory.mktemp("kuberay"))
    with network("head", "one") as machines, ray_cluster(rendered, machines, folder) as pods:
        running = Cluster(pods, rendered)
        until(running.operator.answers, 240, running.why_not)
        yield running


def replicas(state: dict[str, Any]) -> list[tuple[str, int]]:
    """Serve's replicas of models, and the processes of their engines."""
    found = [one for model in state["models"] for one in model["replicas"]]
    return [(one["id"], one["engine_pid"]) for one in found]


def in_flight(state: dict[str, Any]) -> int:
    return sum(one["in_flight"] for model in state["models"] for one in model["replicas"])


def test_traffic_moves_once_the_model_answers(cluster: Cluster) -> None:
    put = cluster.operator.update_deployments(serve_config(cluster.rendered, cluster.head))
    assert put.status_code == 200, put.text
    seen: set[str] = set()
    deadline = time.monotonic() + READY_S
    while not cluster.operator.moves_traffic():
        statuses = cluster.operator.statuses()
        assert "DEPLOY_FAILED" not in statuses.values(), cluster.why_not()
        if statuses.pop(READY_APP, "") != "RUNNING" and set(statuses.values()) == {"RUNNING"}:
            seen.add("all but ready ran")
        if cluster.probe(cluster.worker)[0] == 503:
            seen.add("the gateway refused clients")
        assert time.monotonic() < deadline, cluster.why_not()
        time.sleep(0.3)
    # Without the application ready, KubeRay would have moved traffic then.
    assert seen == {"all but ready ran", "the gateway refused clients"}
    assert cluster.ask(4).status_code == 200
    until(lambda: cluster.probe(cluster.worker) == (200, "success"), 20, cluster.why_not)
    assert {BATCH_APP, gateway_app("one")} <= cluster.operator.statuses().keys()
    (app,) = cluster.operator.applications("imperative")
    assert app.startswith(MODEL_APP_PREFIX)


def test_who_has_no_token_changes_nothing(cluster: Cluster) -> None:
    for token in ("", "0" * 64):
        answer = Operator(cluster.head.machine, token).update_deployments("applications: []")
        assert answer.status_code in (401, 403)
    assert cluster.operator.statuses()[READY_APP] == "RUNNING"


def test_the_head_has_no_devices_and_what_there_is_but_once(cluster: Cluster) -> None:
    state = cluster.state()
    assert {node["name"] for node in state["nodes"]} == {"head", "one"}
    (model,) = state["models"]
    assert [one["device"] for one in model["replicas"]] == ["core0"]
    (clusters,) = Path(cluster.head.here("/var/lib/loomserve/clusters")).iterdir()
    assert (clusters / "wishes/wishes.sqlite").exists()


def test_a_model_survives_the_second_time(cluster: Cluster) -> None:
    before = cluster.state()
    again = cluster.operator.update_deployments(serve_config(cluster.rendered, cluster.head))
    assert again.status_code == 200
    time.sleep(3)
    assert cluster.operator.moves_traffic()
    assert replicas(cluster.state()) == replicas(before)

    text = config(max_sequences=7)
    changed = manifests(text)
    answers: list[httpx.Response] = []
    streaming = Thread(target=lambda: answers.append(cluster.ask(300, stream=True)))
    streaming.start()
    time.sleep(1)
    # KubeRay does not wait for the kubelet to bring the Secret: the builders do.
    put = cluster.operator.update_deployments(serve_config(changed, cluster.head))
    assert put.status_code == 200, put.text
    time.sleep(3)
    assert not cluster.operator.moves_traffic()
    Path(cluster.head.here("/etc/loomserve/config.yaml")).write_text(text)
    until(cluster.operator.moves_traffic, 240, cluster.why_not)

    streaming.join(120)
    (answer,) = answers
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("data: [DONE]")
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if '"text"' in line]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"

    until(lambda: replicas(cluster.state()) == replicas(before), 60, cluster.why_not)
    until(lambda: cluster.ask(4).status_code == 200, 60, cluster.why_not)
    refused = cluster.ask(1, prompt=["a"] * 8)
    assert (refused.status_code, "7" in refused.text) == (400, True)


class Asking(Thread):
    """A client that asks for a token again and again, each time by a connection of its own."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._ended = Event()
        self.answers: list[int | str] = []
        """Each one's status, or what became of its connection."""

    def run(self) -> None:
        while not self._ended.wait(0.1):
            try:
                self.answers.append(self._cluster.ask(1).status_code)
            except httpx.HTTPError as error:
                self.answers.append(repr(error))

    def __enter__(self) -> Asking:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(120)


class Streaming(Thread):
    """A client that reads a stream to its end, however that comes."""

    def __init__(self, cluster: Cluster, tokens: int) -> None:
        super().__init__()
        self._cluster, self._tokens = cluster, tokens
        self.lines: list[str] = []
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        # Its connection may just end.
        with suppress(httpx.HTTPError), self._cluster.stream(self._tokens) as answer:
            for line in answer.iter_lines():
                self.lines.append(line)
        self.ended_at = time.monotonic()

    @property
    def tokens(self) -> int:
        return sum('"text"' in line for line in self.lines)

    @property
    def whole(self) -> bool:
        return "data: [DONE]" in self.lines


def test_gateways_are_replaced_while_clients_ask_and_streams_have_their_time(
    cluster: Cluster,
) -> None:
    before = cluster.state()
    text = config(max_sequences=6)
    long = [Streaming(cluster, 900) for _ in range(LONG_STREAMS)]
    until(lambda: all(each.tokens > 0 for each in long), 60, cluster.why_not)
    with Asking(cluster) as asking:
        put = cluster.operator.update_deployments(serve_config(manifests(text), cluster.head))
        assert put.status_code == 200, put.text
        Path(cluster.head.here("/etc/loomserve/config.yaml")).write_text(text)
        # The new one answers before the one that it replaces is told to end.
        until(lambda: cluster.ask(1, prompt=["a"] * 7).status_code == 400, 240, cluster.why_not)
        replaced_at = time.monotonic()
        until(cluster.operator.moves_traffic, 240, cluster.why_not)
    for each in long:
        each.join(120)
    print(
        f"{len(asking.answers)} requests while gateways were replaced; streams of "
        f"{[each.tokens for each in long]} tokens ended "
        f"{[round(each.ended_at - replaced_at, 1) for each in long]} s after, "
        f"whole: {[each.whole for each in long]}"
    )
    assert len(asking.answers) > 20
    assert set(asking.answers) == {200}
    # Those that take longer than their gateway waits end without an end, and no other does.
    for each in long:
        assert each.whole or each.ended_at >= replaced_at + DRAIN_S - SLACK_S
    assert replicas(cluster.state()) == replicas(before)
    # The engine computes for none of those that were cut.
    until(lambda: in_flight(cluster.state()) == 0, 30, cluster.why_not)


def test_a_stream_ends_well_when_its_pod_is_told_to_end(cluster: Cluster) -> None:
    answers: list[httpx.Response] = []
    streaming = Thread(target=lambda: answers.append(cluster.ask(300, stream=True)))
    streaming.start()
    time.sleep(1)
    assert streaming.is_alive()
    cluster.worker.end()
    streaming.join(120)
    (answer,) = answers
    assert answer.text.rstrip().endswith("data: [DONE]")

"""KubeRay's part, played on nodes of this machine: pods of a rendered chart, and REST calls.

What a pod has is taken from the rendered RayService: its command, environment, parameters of Ray.
Its folders become folders of the test, and it is told its address, which a pod's network says.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.cluster import STOP_S
from tests.cluster.nodes import Command, Node
from tests.unit.kubernetes.chart import Manifest, only

DASHBOARD_PORT, GCS_PORT, TOKEN = 8265, 6379, "f" * 64
APPLICATIONS = "/api/serve/applications/"


@dataclass
class Pod:
    """A pod, as KubeRay makes it of its template and the parameters of ``ray start``."""

    machine: Node
    folder: Path
    template: Manifest
    parameters: dict[str, str]
    head: str | None = None
    """HOST:PORT; None: it is the head."""
    cluster: str = "loom-abcde"
    """The RayCluster's name, which each generation has its own of."""
    running: Command | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.machine.name}.log"

    def start(self, secrets: Mapping[str, Mapping[str, str]]) -> None:
        (container,) = self.template["spec"]["containers"]
        given = self._environment(container, secrets)
        # ``utils.GetContainerCommand`` and ``BuildPod`` in KubeRay's common/pod.go.
        prepared = " ".join(container["command"])
        script = f"{prepared} && ulimit -n 65536; exec {self._ray_start()}"
        self.running = self.machine.start(["/bin/bash", "-c", script], self.log, given)

    def end(self) -> None:
        """As Kubernetes does: SIGTERM to the container's first process."""
        if self.running is not None:
            self.running.send_signal(signal.SIGTERM)
            self.running.wait(STOP_S)
            self.running = None

    def _ray_start(self) -> str:
        """``generateRayStartCommand``, with ``setMissingRayStartParams``."""
        completed = {
            "metrics-export-port": "8080",
            "block": "true",
            "dashboard-agent-listen-port": "52365",
            **({"dashboard-host": "0.0.0.0"} if self.head is None else {"address": self.head}),
            "node-ip-address": self.machine.address,
            "temp-dir": f"{self.machine.temporary}/ray",
            **self.parameters,
        }
        flags = [
            f"--{name}" if value == "true" else f"--{name}={value}"
            for name, value in sorted(completed.items())
        ]
        return " ".join(["ray start", *(["--head"] if self.head is None else []), *flags])

    def _environment(
        self, container: Manifest, secrets: Mapping[str, Mapping[str, str]]
    ) -> dict[str, str]:
        given: dict[str, str] = {}
        for one in container["env"]:
            source = one.get("valueFrom", {})
            if "secretKeyRef" in source:
                value = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            elif "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == "metadata.labels['ray.io/cluster']"
                value = self.cluster
            else:
                value = one["value"]
            # As Kubernetes does with variables that stand ahead.
            given[one["name"]] = re.sub(
                r"\$\((\w+)\)", lambda found: given[found[1]], self.here(value)
            )
        commands = Path(sys.executable).parent
        return given | {
            # ``SetContainerTokenAuthEnvVars``.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "PATH": f"{commands}:{os.environ['PATH']}",
        }

    def here(self, text: str) -> str:
        """Paths of the pod as they are in the test."""
        return (
            text.replace("/var/lib/loomserve", str(self.folder / "lib"))
            .replace("/etc/loomserve", str(self.folder))
            .replace("/tmp/loomserve", f"{self.machine.temporary}/l")
        )


class Operator:
    """The very requests of KubeRay's ``RayDashboardClient``."""

    def __init__(self, head: Node, token: str = TOKEN) -> None:
        self._client = httpx.Client(
            base_url=f"http://{head.address}:{DASHBOARD_PORT}",
            headers={"x-ray-authorization": f"Bearer {token}"} if token else {},
            timeout=60,
        )

    def update_deployments(self, serve_config: str) -> httpx.Response:
        """``UpdateDeployments``; the YAML of the RayService goes as JSON."""
        return self._client.put(APPLICATIONS, json=yaml.safe_load(serve_config))

    def applications(self, api_type: str = "declarative") -> dict[str, Any]:
        """``GetServeDetails``."""
        answer = self._client.get(APPLICATIONS, params={"api_type": api_type})
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()["applications"]
        return found

    def statuses(self) -> dict[str, str]:
        return {name: app["status"] for name, app in self.applications().items()}

    def answers(self) -> bool:
        """Whether the dashboard does."""
        try:
            self.applications()
        except httpx.HTTPError:
            return False
        return True

    def moves_traffic(self) -> bool:
        """``reconcileServe``: all declarative applications run."""
        statuses = self.statuses()
        return bool(statuses) and set(statuses.values()) == {"RUNNING"}


@contextmanager
def ray_cluster(
    manifests: list[Manifest],
    machines: tuple[Node, ...],
    folder: Path,
    name: str = "loom-abcde",
) -> Iterator[tuple[Pod, ...]]:
    """The pods of a RayService's cluster of this name: the head, and one a group."""
    cluster = only(manifests, "RayService")["spec"]["rayClusterConfig"]
    secrets = {
        made["metadata"]["name"]: made["stringData"]
        for made in manifests
        if made["kind"] == "Secret"
    }
    (folder / "config.yaml").write_text(secrets["loom-config"]["config.yaml"])
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    address = f"{machines[0].address}:{GCS_PORT}"
    pods = tuple(
        Pod(
            machine,
            folder,
            group["template"],
            group["rayStartParams"],
            address if "groupName" in group else None,
            name,
        )
        for machine, group in zip(machines, groups, strict=True)
    )
    try:
        for pod in pods:
            pod.start(secrets)
        yield pods
    finally:
        for pod in reversed(pods):
            pod.end()

"""What KubeRay's operator refuses in Go, and its schema lets pass.

The rules are those of ``ValidateRayServiceMetadata``, ``ValidateRayServiceSpec`` and
``ValidateRayClusterSpec`` in KubeRay's ``validation.go`` on 2026-08-19, after v1.7.0, as far as the
chart writes the fields that they are about. Each is a sentence; a manifest that breaks none passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.unit.kubernetes.chart import Manifest

_MOST_NAME = 47
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OF_REDIS = ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS")


def broken_rules(service: Manifest) -> list[str]:
    return [*_of_service(service), *_of_cluster(service["spec"]["rayClusterConfig"])]


def _of_service(service: Manifest) -> Iterator[str]:
    name, spec = service["metadata"]["name"], service["spec"]
    if len(name) > _MOST_NAME or not _LABEL.fullmatch(name):
        yield "the name is a DNS label of 47 characters at most"
    strategy = spec.get("upgradeStrategy", {}).get("type", "NewCluster")
    if strategy not in ("None", "NewCluster", "NewClusterWithIncrementalUpgrade"):
        yield f"there is no upgrade strategy {strategy}"
    cluster = spec["rayClusterConfig"]
    if strategy == "NewClusterWithIncrementalUpgrade":
        if not cluster.get("enableInTreeAutoscaling"):
            yield "incremental upgrades need the autoscaler"
        if "clusterUpgradeOptions" not in spec["upgradeStrategy"]:
            yield "incremental upgrades need their options"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "the delay of deletion is no negative number"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "the head's service has no name of ours"
    if cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
        yield "a RayService has no tokens of Kubernetes"
    if "upgradeStrategy" in cluster:
        yield "a cluster of a RayService has no upgrade strategy"


def _of_cluster(cluster: dict[str, Any]) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    yield from _of_group("head", head)
    autoscales = cluster.get("enableInTreeAutoscaling", False)
    for group in cluster["workerGroupSpecs"]:
        name = group["groupName"]
        yield from _of_group(name, group)
        least, most = group.get("minReplicas"), group.get("maxReplicas")
        if not autoscales and (least is None or most is None):
            yield f"{name}: minReplicas and maxReplicas are given"
        if least is not None and most is not None and not 0 <= least <= most:
            yield f"{name}: minReplicas is from 0 to maxReplicas"
        if autoscales and group.get("suspend"):
            yield f"{name}: no group is suspended beside the autoscaler"
    (container,) = head["template"]["spec"]["containers"]
    names = {one["name"] for one in container.get("env", ())}
    external = cluster.get("gcsFaultToleranceOptions")
    if external is None and "RAY_REDIS_ADDRESS" in names:
        yield "RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions"
    if external is not None and (
        names.intersection(_OF_REDIS) or "redis-password" in head["rayStartParams"]
    ):
        yield "Redis is named in gcsFaultToleranceOptions alone"
    if external is not None and external.get("backend") != "rocksdb" and "storage" in external:
        yield "Redis has no storage"
    if "REDIS_USERNAME" in names or "redis-username" in head["rayStartParams"]:
        yield "Redis' user is named in gcsFaultToleranceOptions alone"
    if cluster.get("authOptions", {}).get("mode") == "token":
        version = tuple(map(int, cluster.get("rayVersion", "0").split(".")))
        if version < (2, 52, 0):
            yield "tokens need Ray 2.52"


def _of_group(name: str, group: dict[str, Any]) -> Iterator[str]:
    started = group["rayStartParams"]
    if not group["template"]["spec"]["containers"]:
        yield f"{name}: there is a container"
    if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(started):
        yield f"{name}: resources stand in one place"
    if "labels" in started:
        yield f"{name}: labels are not among the parameters"

"""What the chart may write of KubeRay's RayService, strictly.

Names and types are those of KubeRay's definition (``ray.io/v1``) on 2026-08-19, after v1.7.0: of
its fields those that the chart, or a mistake that tests plant, has a use for. Pods within are
checked by Kubernetes' own schema (:mod:`.schemas`).
"""

from __future__ import annotations

from typing import Any

from tests.unit.kubernetes.schema_parts import COUNT, FLAG, TEXT, TEXTS, Schema, list_of, of

_GROUP = {
    "labels": TEXTS,
    "rayStartParams": TEXTS,
    "resources": TEXTS,
    "template": {"type": "object"},
}
_CLUSTER = of(
    {
        "authOptions": of(
            {
                "mode": {"enum": ["disabled", "token"]},
                "enableK8sTokenAuth": FLAG,
                "secretName": TEXT,
            }
        ),
        "enableInTreeAutoscaling": FLAG,
        "gcsFaultToleranceOptions": of(
            {
                "redisAddress": TEXT,
                "redisPassword": of({"value": TEXT, "valueFrom": {"type": "object"}}),
            },
            "redisAddress",
        ),
        "headGroupSpec": of(
            {**_GROUP, "headService": {"type": "object"}},
            "template",
        ),
        "rayVersion": TEXT,
        "upgradeStrategy": of({"type": TEXT}),
        "workerGroupSpecs": list_of(
            of(
                {
                    **_GROUP,
                    "groupName": TEXT,
                    "maxReplicas": COUNT,
                    "minReplicas": COUNT,
                    "replicas": COUNT,
                },
                "groupName",
                "template",
            )
        ),
    },
    "headGroupSpec",
)
RAY_SERVICE: Schema = of(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": {"type": "object"},
        "spec": of(
            {
                "excludeHeadPodFromServeSvc": FLAG,
                "rayClusterConfig": _CLUSTER,
                "rayClusterDeletionDelaySeconds": COUNT,
                "serveConfigV2": TEXT,
                "upgradeStrategy": of({"type": TEXT, "clusterUpgradeOptions": {"type": "object"}}),
            },
            "rayClusterConfig",
        ),
    },
    "apiVersion",
    "kind",
    "spec",
)


def pod_templates(service: dict[str, Any]) -> dict[str, Any]:
    """Of the head and the worker groups, by where they stand."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = enumerate(cluster.get("workerGroupSpecs", ()))
    return {
        "headGroupSpec": cluster["headGroupSpec"]["template"],
        **{f"workerGroupSpecs[{at}]": group["template"] for at, group in groups},
    }

"""The chart as Helm renders it: right by the schemas, and what its parts have to agree on."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml

from loomserve.platform.access.keys import hash_key
from loomserve.platform.config.loader import parse
from loomserve.platform.fleet.messages import (
    BATCH_APP,
    CONTROLLER_APP,
    GATEWAY_APP,
    gateway_app,
)
from loomserve.platform.kubernetes.commands import environment_file, values_file
from loomserve.platform.kubernetes.pods import INTERNAL_TOKEN_VARIABLE, pod_environment
from loomserve.platform.kubernetes.values import SSD_FOLDER, derived_values
from loomserve.platform.requests.endpoints import ENDPOINTS
from loomserve.platform.run.ray_environment import OBJECT_STORE_BYTES
from tests.unit.kubernetes.chart import (
    CHART,
    DUMPER,
    FOLDERS,
    LOADER,
    ROOT,
    Manifest,
    environment,
    helm,
    merged,
    only,
    pods,
    render,
    values_of,
)
from tests.unit.kubernetes.operator_rules import broken_rules
from tests.unit.kubernetes.schemas import NEWEST, OLDEST, OTHERS, problems

# One process renders the chart, and reads Kubernetes' schemas.
pytestmark = pytest.mark.xdist_group("chart")

WEIGHTS = {"smollm2-135m": 270 * 10**6, "qwen3-8b": 16_400 * 10**6, "qwen3-32b": 65_600 * 10**6}
NAMES = [folder.name for folder in FOLDERS]
# Each with the folder whose values it is added to.
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "redis": ("nodes-cpu", {"gcs": {"redis": {"address": "redis:6379"}}}),
    "second set": (
        "nodes-cpu",
        {
            "upgrade": {"strategy": "NewCluster"},
            "storage": {"state": {"accessMode": "ReadWriteMany"}},
        },
    ),
    "own claims": (
        "nodes-cpu",
        {
            "storage": {
                "state": {"existingClaim": "s"},
                "models": {"existingClaim": "m"},
                "weights": {"existingClaim": "w"},
            }
        },
    ),
    "own claim": ("node-cpu", {"storage": {"state": {"existingClaim": "s"}}}),
    "own secret": ("nodes-cpu", {"secrets": {"existing": "ours"}}),
    "route": ("node-cpu", {"route": {"enabled": True, "parentRefs": [{"name": "public"}]}}),
    "monitoring": (
        "nodes-cpu",
        {"monitoring": {"enabled": True, "labels": {"release": "prometheus"}}},
    ),
    "alerts": (
        "node-cpu",
        {"monitoring": {"rules": {"enabled": True, "labels": {"release": "prometheus"}}}},
    ),
    "no dashboards": ("node-cpu", {"monitoring": {"dashboards": {"enabled": False}}}),
    "dashboards in a folder": (
        "node-cpu",
        {"monitoring": {"dashboards": {"annotations": {"grafana_folder": "Loomserve"}}}},
    ),
    "no policies": (
        "nodes-cpu",
        {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    ),
    "peers": (
        "nodes-cpu",
        {
            "networkPolicy": {
                "clients": [{"podSelector": {}}],
                "admins": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
                "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
            }
        },
    ),
    "more memory": ("nodes-cpu", {"resources": {"memory": {"one": "64Gi"}, "cpus": {"head": 4}}}),
    "placed": (
        "nodes-cpu",
        {
            "nodeSelector": {"a": "b"},
            "placement": {"one": {"c": "d"}},
            "priorityClassName": "high",
            "tolerations": [{"operator": "Exists"}],
        },
    ),
    "environment": ("node-cpu", {"env": [{"name": "HF_HUB_OFFLINE", "value": "1"}]}),
    "image by digest": ("node-cpu", {"image": {"tag": "", "digest": "sha256:" + "0" * 64}}),
    "private registry": ("node-cpu", {"image": {"pullSecrets": ["registry"]}}),
    "outside": ("node-cpu", {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}),
}


@cache
def rendered(case: str) -> list[Manifest]:
    if case in FLAGS:
        folder, flags = FLAGS[case]
        return render(merged(values_of(folder), flags))
    return render(values_of(case))


@pytest.fixture(params=[*NAMES, *FLAGS])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


def test_there_are_values_of_both_modes() -> None:
    assert {values_of(name)["mode"] for name in NAMES} == {"node", "rayservice"}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_no_manifest_has_a_field_that_is_not_there(manifests: list[Manifest], version: str) -> None:
    found = {made["kind"]: problems(made, version) for made in manifests}
    assert {kind: lines for kind, lines in found.items() if lines} == {}


def test_the_operator_has_nothing_to_refuse(manifests: list[Manifest]) -> None:
    services = [made for made in manifests if made["kind"] == "RayService"]
    assert [rule for service in services for rule in broken_rules(service)] == []


def test_helm_has_nothing_to_remark() -> None:
    for name in NAMES:
        report = helm().lint(CHART, values_of(name), strict=True, namespace="models")
        # A chart has no icon of its own.
        worse = [said for said in report["messages"] if said["severity"] > 1]
        assert (worse, report["errors"]) == ([], [])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kubectl_reads_what_is_rendered(manifests: list[Manifest], tmp_path: Any) -> None:
    (tmp_path / "all.yaml").write_text(yaml.dump_all(manifests, Dumper=DUMPER))
    (tmp_path / "kustomization.yaml").write_text("resources: [all.yaml]\n")
    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert len(list(yaml.load_all(built.stdout, Loader=LOADER))) == len(manifests)


@pytest.mark.parametrize("name", NAMES)
def test_derived_values_are_those_of_the_configuration(name: str) -> None:
    folder = ROOT / "k8s/values" / name
    text = (folder / "config.yaml").read_text()
    made = values_file(text, derived_values(text, parse(text), WEIGHTS))
    assert (folder / "derived.yaml").read_text() == made, "run k8s/values/make.sh"
    assert values_of(name)["config"] == text


def test_the_pods_environment_is_that_of_the_code() -> None:
    assert (CHART / "files/environment.yaml").read_text() == environment_file()
    for name, pod in pods(rendered("nodes-cpu")).items():
        given = environment(pod)
        assert pod_environment().items() <= given.items(), name
        assert given[INTERNAL_TOKEN_VARIABLE]["secretKeyRef"]["key"] == "internal-token"


def test_nothing_in_a_pod_can_write_where_it_should_not(manifests: list[Manifest]) -> None:
    for pod in pods(manifests).values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not container["image"].endswith((":latest", ":"))
        mounted = {one["mountPath"] for one in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm", "/var/lib/loomserve"} <= mounted
        volumes = {one["name"] for one in spec["volumes"]} | {"home"}
        assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_no_token_stands_in_a_pod_or_in_the_configuration_of_serve(
    manifests: list[Manifest],
) -> None:
    secrets = [made for made in manifests if made["kind"] == "Secret"]
    tokens = [
        value for secret in secrets for key, value in secret["stringData"].items() if "token" in key
    ]
    rest = json.dumps([made for made in manifests if made["kind"] != "Secret"])
    assert [token for token in tokens if token in rest] == []


def test_tokens_have_the_hashes_that_loomserve_makes_of_them() -> None:
    made = only(rendered("node-cpu"), "Secret", "loom-tokens")["stringData"]
    for kind in ("admin", "metrics"):
        assert made[f"{kind}-token-hash"] == hash_key(made[f"{kind}-token"])
    assert len(made["internal-token"]) >= 32


def test_an_own_secret_is_taken_instead() -> None:
    made = rendered("own secret")
    assert [each["metadata"]["name"] for each in made if each["kind"] == "Secret"] == [
        "loom-config"
    ]
    for pod in pods(made).values():
        assert environment(pod)["LOOMSERVE_ADMIN_TOKEN_HASH"]["secretKeyRef"]["name"] == "ours"


def test_pods_have_the_memory_that_the_configuration_takes(manifests: list[Manifest]) -> None:
    for pod in pods(manifests).values():
        (container,) = pod["spec"]["containers"]
        limits, requests = (container["resources"][each] for each in ("limits", "requests"))
        assert requests["memory"] == limits["memory"]
        (shared,) = [one for one in pod["spec"]["volumes"] if one["name"] == "shared-memory"]
        assert shared["emptyDir"]["medium"] == "Memory"
        size = int(shared["emptyDir"]["sizeLimit"])
        assert OBJECT_STORE_BYTES <= size < int(limits["memory"].removesuffix("Gi")) * 2**30


@pytest.mark.parametrize("name", ["node-gpu", "nodes-gpu"])
def test_pods_ask_for_the_gpus_that_devices_name(name: str) -> None:
    config = parse(values_of(name)["config"])
    for node, pod in pods(rendered(name)).items():
        (container,) = pod["spec"]["containers"]
        wanted = sum(device.on == node for device in config.devices)
        assert int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) == wanted
        mounts = {one["mountPath"] for one in container["volumeMounts"]}
        assert (SSD_FOLDER in mounts) == (node != "head")


def test_each_step_of_an_end_has_room_for_the_one_within_it(manifests: list[Manifest]) -> None:
    (config,) = [
        parse(made["stringData"]["config.yaml"])
        for made in manifests
        if made["metadata"]["name"] == "loom-config"
    ]
    server = config.server
    for name, pod in pods(manifests).items():
        (container,) = pod["spec"]["containers"]
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        ray = int(environment(pod).get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 0))
        if name == "local":
            # Serve gives gateways 15 s more than requests have, and the KV store has 30 s.
            assert grace >= pause + server.drain_timeout_s + 15 + 30
        else:
            assert grace > pause + ray > pause + server.drain_timeout_s + 15
    for made in manifests:
        if made["kind"] == "RayService":
            assert made["spec"]["rayClusterDeletionDelaySeconds"] > server.request_timeout_s


def test_ray_is_offered_what_the_nodes_have() -> None:
    cluster = only(rendered("nodes-gpu"), "RayService")["spec"]["rayClusterConfig"]
    offers = {
        group.get("groupName", "head"): json.loads(group["rayStartParams"]["resources"].strip("'"))
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    }
    assert offers == {
        "head": {"loomserve_node:head": 1, "loomserve_state": 1},
        "one": {"loomserve_node:one": 1, "loomserve_gpu:one:0": 1, "loomserve_gpu:one:1": 1},
        "two": {"loomserve_node:two": 1, "loomserve_gpu:two:0": 1, "loomserve_gpu:two:1": 1},
    }
    head = cluster["headGroupSpec"]["rayStartParams"]
    assert (head["num-cpus"], head["num-gpus"]) == ("0", "0")
    assert int(head["object-store-memory"]) == OBJECT_STORE_BYTES


def test_groups_stand_in_the_order_of_the_configuration() -> None:
    text = values_of("nodes-cpu")["config"]
    text = text.replace("node: one", "node: zebra").replace("node: two", "node: ant")
    values = merged(
        yaml.safe_load(values_file(text, derived_values(text, parse(text), WEIGHTS))),
        {"image": {"repository": "r", "tag": "t"}},
    )
    cluster = only(render(values), "RayService")["spec"]["rayClusterConfig"]
    assert [group["groupName"] for group in cluster["workerGroupSpecs"]] == ["zebra", "ant"]


def test_serve_gets_the_applications_that_the_platform_has() -> None:
    service = only(rendered("nodes-gpu"), "RayService")["spec"]
    assert service["excludeHeadPodFromServeSvc"] is True
    serve = yaml.safe_load(service["serveConfigV2"])
    assert serve["proxy_location"] == "Disabled"
    assert [each["name"] for each in serve["applications"]] == [
        CONTROLLER_APP,
        GATEWAY_APP,
        gateway_app("one"),
        gateway_app("two"),
        BATCH_APP,
        "loomserve-ready",
    ]
    without = yaml.safe_load(only(rendered("nodes-cpu"), "RayService")["spec"]["serveConfigV2"])
    assert BATCH_APP not in [each["name"] for each in without["applications"]]


def test_probes_ask_the_gateway(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        (container,) = pod["spec"]["containers"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        if name == "head":
            assert "readinessProbe" not in container, "KubeRay's own asks for Ray"
            continue
        asked = container["readinessProbe"]["httpGet"]
        assert (asked["path"], asked["port"]) == ("/-/healthz", "serve")
        assert ports["serve"] == 8000
        assert "livenessProbe" not in container


def test_disruption_budgets_are_numbers_which_pods_of_kuberay_need(
    manifests: list[Manifest],
) -> None:
    for made in manifests:
        if made["kind"] == "PodDisruptionBudget":
            assert "maxUnavailable" not in made["spec"]
            assert isinstance(made["spec"]["minAvailable"], int)


def test_a_head_whose_knowledge_is_elsewhere_may_be_moved() -> None:
    def budgets(case: str) -> set[str]:
        found = [made for made in rendered(case) if made["kind"] == "PodDisruptionBudget"]
        return {made["metadata"]["name"] for made in found}

    assert budgets("nodes-cpu") - budgets("redis") == {"loom-head"}


def test_selectors_find_the_pods(manifests: list[Manifest]) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(manifests).values()]
    for made in manifests:
        spec = made.get("spec", {})
        wanted = {
            "Service": lambda spec: spec["selector"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
            "PodMonitor": lambda spec: spec["selector"]["matchLabels"],
            "StatefulSet": lambda spec: spec["selector"]["matchLabels"],
        }.get(made["kind"], lambda spec: {})(spec)
        # KubeRay adds labels of its own.
        ours = {key: value for key, value in wanted.items() if not key.startswith("ray.io/")}
        assert all(ours.items() <= each.items() for each in labels), made["kind"]


def test_what_has_no_schema_here_names_ports_and_services_that_there_are() -> None:
    made = rendered("nodes-gpu")
    route = only(made, "HTTPRoute")["spec"]["rules"][0]
    prefix, *others = (match["path"] for match in route["matches"])
    assert prefix == {"type": "PathPrefix", "value": "/v1"}
    elsewhere = {path for path in ENDPOINTS if not path.startswith("/v1/")}
    assert {each["value"] for each in others} == elsewhere
    assert {each["type"] for each in others} == {"Exact"}
    # KubeRay's name of it.
    assert route["backendRefs"] == [{"name": "loom-serve-svc", "port": 8000}]
    assert {each["kind"] for each in made} >= OTHERS


def test_ray_is_told_its_redis_and_where_the_password_is() -> None:
    redis = {"address": "redis:6379", "passwordSecret": {"name": "redis", "key": "password"}}
    rendered = render(merged(values_of("nodes-cpu"), {"gcs": {"redis": redis}}))
    told = only(rendered, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    secret = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    assert told == {"redisAddress": "redis:6379", "redisPassword": secret}
    without = only(render(values_of("nodes-cpu")), "RayService")["spec"]["rayClusterConfig"]
    assert "gcsFaultToleranceOptions" not in without


@pytest.mark.parametrize("folder", ["node-cpu", "nodes-cpu"])
def test_claims_are_as_large_and_as_shared_as_values_say(folder: str) -> None:
    state = {"size": "7Gi", "storageClass": "fast", "accessMode": "ReadWriteMany"}
    rendered = render(merged(values_of(folder), {"storage": {"state": state}}))
    claims = [made["spec"] for made in rendered if made["kind"] == "PersistentVolumeClaim"]
    for made in rendered:
        if made["kind"] == "StatefulSet":
            claims += [each["spec"] for each in made["spec"]["volumeClaimTemplates"]]
    (claim,) = claims
    assert claim == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "7Gi"}},
    }

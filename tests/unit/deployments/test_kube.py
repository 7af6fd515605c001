"""The builders that a serveConfigV2 names: what they agree on, each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve._private import application_state
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from loomserve.deployments import kube
from loomserve.deployments.batch.standby import StandbyBatchLane
from loomserve.deployments.controller.pod_controller import PodController
from loomserve.deployments.readiness import Ready
from loomserve.platform.access.keys import VARIABLES, hash_key
from loomserve.platform.fleet.messages import (
    BATCH_DEPLOYMENT,
    CONTROLLER_DEPLOYMENT,
    GATEWAY_DEPLOYMENT,
    READY_DEPLOYMENT,
)
from loomserve.platform.kubernetes.pods import INTERNAL_TOKEN_VARIABLE
from loomserve.platform.kubernetes.values import digest
from loomserve.platform.nodes.resources import on_node, on_state

TOKEN = "t" * 48
TEXT = """
cluster: {gateways: each_node}
devices: [{name: core0, cores: [0], node: one}]
models: [{name: m, source: demo, devices: [core0]}]
kvstore: {memory: 64MiB}
batch: {}
server: {host: 0.0.0.0, allow_unauthenticated: true}
"""


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv(INTERNAL_TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv(VARIABLES["admin_token_hash"], hash_key("admin"))
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return {"config": str(path), "digest": digest(TEXT)}


def deployment(app: Any) -> Any:
    return app._bound_deployment


def bound(app: Any) -> tuple[Any, ...]:
    given: tuple[Any, ...] = deployment(app).init_args
    return given


def test_each_application_has_the_deployment_that_the_others_call(args: dict[str, str]) -> None:
    built = {
        CONTROLLER_DEPLOYMENT: (kube.controller, PodController),
        GATEWAY_DEPLOYMENT: (kube.gateway, None),
        BATCH_DEPLOYMENT: (kube.batch, StandbyBatchLane),
        READY_DEPLOYMENT: (kube.ready, Ready),
    }
    for name, (build, what) in built.items():
        made = deployment(build(args))
        assert made.name == name
        assert what is None or made.func_or_class is what
        # Nothing asks for cores, which Ray's head has none of.
        options = made.ray_actor_options
        assert (options["num_cpus"], options["resources"]) == (0, on_state())


def test_a_nodes_gateway_is_on_that_node(args: dict[str, str]) -> None:
    made = deployment(kube.gateway({**args, "node": "one"}))
    assert made.ray_actor_options["resources"] == on_node("one")


def test_all_have_the_token_of_the_secret(args: dict[str, str]) -> None:
    for build in (kube.controller, kube.gateway, kube.batch):
        assert TOKEN in bound(build(args))


def test_the_admin_token_is_the_secrets(args: dict[str, str]) -> None:
    server = bound(kube.gateway(args))[0]
    assert server["admin_token_hash"] == hash_key("admin")
    # Wherever it runs, it needs no folder of the builder's.
    assert server["audit_log"].endswith("audit-8000.log")


def test_traffic_waits_for_the_configured_models(args: dict[str, str]) -> None:
    assert bound(kube.ready(args)) == (["m"],)


def test_nothing_starts_without_a_token(
    args: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(INTERNAL_TOKEN_VARIABLE)
    for build in (kube.controller, kube.gateway, kube.batch):
        with pytest.raises(RayServeException, match=INTERNAL_TOKEN_VARIABLE):
            build(args)


def test_nothing_starts_with_another_configuration(
    args: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "_CONFIG_TIMEOUT_S", 0.0)
    with pytest.raises(RayServeException, match="another hand"):
        kube.ready({**args, "digest": digest("another")})


def test_what_is_wrong_in_the_configuration_is_said_with_its_line(args: dict[str, str]) -> None:
    wrong = TEXT.replace("batch: {}", "batches: {}")
    Path(args["config"]).write_text(wrong)
    with pytest.raises(RayServeException, match=r"config\.yaml:6: batches"):
        kube.batch({**args, "digest": digest(wrong)})


def test_what_is_wrong_is_the_applications_message_as_it_is(
    args: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application_state, "configure_component_logger", lambda **_: None)
    build = application_state.build_serve_application._function

    def message() -> str:
        empty: dict[str, Any] = {}
        _, _, told = build(
            "loomserve.deployments.kube:batch", "1", "a", args, LoggingConfig(), None, *[empty] * 3
        )
        return str(told)

    wrong = TEXT.replace("batch: {}", "")
    Path(args["config"]).write_text(wrong)
    args["digest"] = digest(wrong)
    assert message() == "the configuration has no section batch"

    def fails(*_: Any) -> None:
        raise OSError("the disk\nis on fire")

    monkeypatch.setattr(kube, "read_config", fails)
    assert message() == "OSError: is on fire (Serve's log in the head's pod shows where)"

"""What an engine is started with."""

from __future__ import annotations

import pytest

from loomserve.deployments.engine.app import _engine_options
from loomserve.platform.config import Device, Model
from loomserve.platform.fleet.messages import EngineSpec
from loomserve.platform.scheduling.options import SchedulerOptions


@pytest.mark.parametrize("revision", [None, "0123abcd"])
def test_an_engine_fetches_the_configured_revision(revision: str | None) -> None:
    spec = EngineSpec(
        model=Model(name="m", source="org/m", revision=revision, devices=("core0",)),
        devices=(Device(name="core0", kind="cpu", cores=(0,)),),
        path="org/m",
        internal_token="t",
        drain_timeout_s=1,
        kv_transfer_config=None,
        lending=None,
        scheduling=SchedulerOptions(),
    )
    assert _engine_options(spec).get("revision") == revision

"""What a model's files have wrong is told before its engine starts; mended, it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loomserve.platform.models import catalog
from tests.e2e.conftest import COLD_MODEL, Platform
from tests.e2e.test_admin import ask, model_state, wait_for

pytestmark = pytest.mark.e2e


def asked(platform: Platform) -> httpx.Response:
    with platform.http() as client:
        return client.post("/v1/completions", json={"model": "warm", "prompt": "a"})


@pytest.fixture
def unloaded(platform: Platform) -> Iterator[None]:
    """Other tests wait until all models are ready."""
    yield
    with platform.admin() as admin:
        admin.delete("/admin/v1/models/warm", params={"timeout_s": 0})
    wait_for(lambda: model_state(platform, "warm") is None, 60)


@pytest.mark.usefixtures("unloaded")
def test_wrong_sampling_defaults_are_named_and_once_mended_the_model_answers(
    platform: Platform, tmp_path: Path
) -> None:
    demo = catalog.resolve("demo", tmp_path)
    assert isinstance(demo, Path)
    for file in demo.iterdir():
        (tmp_path / file.name).symlink_to(file)
    defaults = tmp_path / "generation_config.json"
    defaults.unlink(missing_ok=True)
    defaults.write_text(json.dumps({"temperature": "warm", "eos_token_id": "</s>"}))
    body = {**COLD_MODEL, "name": "warm", "source": str(tmp_path), "devices": ["core0"]}
    with platform.admin() as admin:
        assert admin.post("/admin/v1/models", json=body).status_code == 202
    wait_for(lambda: model_state(platform, "warm")["status"] == "failed", 120)
    told = model_state(platform, "warm")["message"]
    assert f"{defaults}: temperature is a text, 'warm'" in told
    # Gateways hear of it a moment later.
    wait_for(lambda: asked(platform).json()["error"]["code"] == "model_failed", 30)
    assert asked(platform).status_code == 503
    assert "retry-after" not in asked(platform).headers
    defaults.write_text(json.dumps({"temperature": 0.6}))
    with platform.admin() as admin:
        assert admin.post("/admin/v1/models/warm/wake").is_success
        wait_for(
            lambda: model_state(platform, "warm")["status"] == "ready",
            240,
            lambda: model_state(platform, "warm"),
        )
        assert ask(platform, "warm")

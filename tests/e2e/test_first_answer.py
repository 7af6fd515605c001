"""A model that is ready answers; one that would not is failed, with the reason for the operator."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import COLD_MODEL, Platform, simulated
from tests.e2e.test_admin import ask, model_state, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

# Its template is for texts, and gets lists: it is read without complaint, and fails with each chat.
BROKEN = {"chat_template_content_format": "openai"}


def loaded(platform: Platform, name: str, **model: Any) -> None:
    wait_for(lambda: "ready at" in platform.log.read_text(), 120)
    with platform.admin() as admin:
        body = {**simulated(COLD_MODEL), "name": name, "devices": ["core0"], **model}
        assert admin.post("/admin/v1/models", json=body).status_code == 202


def asked(platform: Platform, name: str) -> httpx.Response:
    with platform.http() as client:
        return client.post(
            "/v1/chat/completions",
            json={"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        )


@pytest.mark.parametrize("start", ["now", "on_demand"])
def test_one_that_does_not_answer_is_failed_and_never_ready(platform: Platform, start: str) -> None:
    name, seen = f"mute-{start}", set[str]()
    loaded(platform, name, engine=BROKEN, start=start)

    def has_failed() -> bool:
        if start == "on_demand" and "failed" not in seen:
            # Who waits for it hears it as soon as it is known.
            refused(asked(platform, name))
        seen.add(model_state(platform, name)["status"])
        return "failed" in seen

    def refused(answer: httpx.Response) -> None:
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "model_failed"
        assert "ask the operator" in error["message"]
        assert "try again" not in error["message"]
        assert "retry-after" not in answer.headers

    wait_for(has_failed, 120, lambda: model_state(platform, name))
    assert "ready" not in seen
    message = model_state(platform, name)["message"]
    assert message.startswith("its first request (/v1/chat/completions) was answered ")
    wait_for(lambda: not model_state(platform, name)["replicas"], 60)
    for _ in range(3):
        refused(asked(platform, name))
    assert model_state(platform, name)["status"] == "failed"
    with platform.admin() as admin:
        assert admin.delete(f"/admin/v1/models/{name}").status_code == 202
    wait_for(lambda: model_state(platform, name) is None, 30)


def test_one_that_has_no_chats_is_asked_otherwise(platform: Platform) -> None:
    # Its context has no room for a chat's marks.
    loaded(platform, "short", engine={"max_model_len": 20})
    wait_for(
        lambda: model_state(platform, "short")["status"] == "ready",
        120,
        lambda: model_state(platform, "short"),
    )
    assert ask(platform, "short")
    with platform.admin() as admin:
        assert admin.delete("/admin/v1/models/short").status_code == 202
    wait_for(lambda: model_state(platform, "short") is None, 30)


def test_what_its_files_have_wrong_is_named(platform: Platform) -> None:
    loaded(platform, "misled", engine={"tool_call_parser": "hermez"})
    wait_for(
        lambda: model_state(platform, "misled")["status"] == "failed",
        60,
        lambda: model_state(platform, "misled"),
    )
    assert "the nearest is hermes" in model_state(platform, "misled")["message"]
    with platform.admin() as admin:
        assert admin.delete("/admin/v1/models/misled").status_code == 202

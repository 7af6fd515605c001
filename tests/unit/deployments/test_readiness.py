"""What traffic waits for."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.deployments.readiness import waiting_for
from loomserve.platform.state import ModelState, ModelStatus


def model(name: str, status: ModelStatus, message: str = "") -> Any:
    return ModelState.model_construct(name=name, status=status, message=message)


@pytest.mark.parametrize(
    "status",
    [ModelStatus.READY, ModelStatus.DEGRADED, ModelStatus.ASLEEP, ModelStatus.UNLOADED],
)
def test_for_no_model_that_answers_or_comes_when_it_is_asked_for(status: ModelStatus) -> None:
    assert waiting_for(["a"], [model("a", status)]) == ""


def test_for_models_that_come_and_says_why() -> None:
    models = [
        model("a", ModelStatus.READY),
        model("b", ModelStatus.LOADING),
        model("c", ModelStatus.FAILED, "no memory"),
    ]
    assert waiting_for("abc", models) == "for b (loading), c (failed: no memory)"


def test_for_no_model_that_an_operator_has_added_or_unloaded() -> None:
    assert waiting_for(["gone"], [model("added", ModelStatus.LOADING)]) == ""

"""The section ``elastic``, and a model's ``idle``: models that come and go."""

from __future__ import annotations

from pydantic import Field, model_validator

from loomserve.platform.config.base import FieldError, Section


class Idle(Section):
    """What becomes of a model without requests."""

    sleep_after_s: float | None = Field(
        300.0,
        gt=0,
        description="Seconds without a request after which it gives its KV memory back; null: "
        "never.",
    )
    unload_after_s: float | None = Field(
        3600.0,
        gt=0,
        description="Seconds without a request after which its engines end; null: never.",
    )

    @model_validator(mode="after")
    def _sleeps_first(self) -> Idle:
        sleep_s, unload_s = self.sleep_after_s, self.unload_after_s
        if sleep_s is not None and unload_s is not None and unload_s <= sleep_s:
            raise FieldError(
                f"is {unload_s:g} and sleep_after_s {sleep_s:g}: a model sleeps before it is "
                "unloaded, so make it longer, or set sleep_after_s to null",
                "unload_after_s",
            )
        return self


class Elastic(Section):
    """How requests wait for models that sleep or are not loaded, and how long models stay."""

    wait_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds that a request waits for its model, or for another replica of it, at "
        "most; then it is answered 503.",
    )
    max_waiting: int = Field(
        256,
        ge=1,
        description="Requests that may wait for one model in each gateway; more are answered 503.",
    )
    comment_s: float = Field(
        5.0, gt=0, description="Seconds between two comments that a stream gets while it waits."
    )
    residence_s: float = Field(
        20.0,
        ge=0,
        description="Seconds for which a model that has come is not put away for another.",
    )

"""The section ``models[].lengths``."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.config.base import Name, Section, plain_name


class Lengths(Section):
    """Predictions of how long answers will be, for queues, routing and refusals."""

    predictor: Name | None = Field(
        None,
        description="The name given to loomserve lengths train; one predictor for each model. "
        "null: one of the model's name, which needs no training: it learns from the model's own "
        "answers.",
    )

    def name_for(self, model: str) -> str:
        """The name of this model's predictor."""
        return self.predictor or plain_name(model)

"""The section ``models[].lengths``."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.config.base import Name, Section


class Lengths(Section):
    """Predictions of how long answers will be, for queues, routing and refusals."""

    predictor: Name = Field(
        description="The name given to loomserve lengths train; one predictor for each model."
    )

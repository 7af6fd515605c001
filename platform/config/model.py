"""The section ``models``."""

from __future__ import annotations

from pydantic import model_validator

from loomserve.platform.config.model_checks import MODEL_CHECKS
from loomserve.platform.config.model_fields import ModelFields


class Model(ModelFields):
    """One model as users see it: a name, where its weights are, and where it runs."""

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Model:
        for check in MODEL_CHECKS:
            check(self)
        return self

"""Checks which models an API key may use."""

from __future__ import annotations

from loomserve.platform.base.errors import Forbidden
from loomserve.platform.config import ApiKey


def may_use(key: ApiKey | None, model: str) -> bool:
    """Whether a key may use a model; None: no key is needed."""
    return key is None or not key.models or model in key.models


def check_model(key: ApiKey | None, model: str) -> None:
    """Check that a key may use a model; None: no key is needed.

    Raises:
        Forbidden: the key is for other models.
    """
    if key is not None and not may_use(key, model):
        raise Forbidden(
            f"this API key may not use model {model!r}; it may use: {', '.join(key.models)}",
            param="model",
        )

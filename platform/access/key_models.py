"""Checks which models an API key may use."""

from __future__ import annotations

from loomserve.platform.base.errors import Forbidden
from loomserve.platform.config import Alias, ApiKey


def may_use(key: ApiKey | None, model: str) -> bool:
    """Whether a key may use a model; None: no key is needed."""
    return key is None or not key.models or model in key.models


def usable_models(key: ApiKey | None, name: str, alias: Alias) -> dict[str, int]:
    """The models of an alias that a key's requests for it may go to, with their weights.

    A key that names the alias may use whatever it stands for. Any other gets of it what it may use
    anyway: what an alias is changed to gives no key a model that its operator did not.
    """
    if may_use(key, name):
        return dict(alias.models)
    return {model: weight for model, weight in alias.models.items() if may_use(key, model)}


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

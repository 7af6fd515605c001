"""Checks which models an API key may use."""

from __future__ import annotations

from collections.abc import Sequence

from loomserve.platform.base.errors import Forbidden
from loomserve.platform.config import ApiKey


class KnownKeys:
    """Configured keys by name, for work that is sent with a key's name instead of the key."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = {key.name: key for key in keys}

    def named(self, name: str) -> ApiKey | None:
        """Find a key; None: the platform needs no keys.

        Raises:
            Forbidden: the configuration has no such key any more.
        """
        if not self._keys and not name:
            return None
        if name not in self._keys:
            raise Forbidden(f"the API key {name!r} that sent this batch is no longer known here")
        return self._keys[name]


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

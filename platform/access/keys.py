"""API keys: made, hashed, given by the environment, recognised, and which models each may use."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable

from pydantic import TypeAdapter, ValidationError

from loomserve.platform.base.errors import Forbidden, StartError, Unauthorized
from loomserve.platform.config import Alias, ApiKey, Config
from loomserve.platform.config.keys import KeyHash


def new_key() -> tuple[str, str]:
    """Make a key and its hash. The key is shown once; only the hash is kept."""
    key = "lsk-" + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """Hash a key as the configuration keeps it: ``sha256:HEX``. Keys are 256 random bits, so nobody
    can guess one from its hash, however fast the hash is. Slow, salted hashes protect passwords
    that people choose; here they would only cost time on every request."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def is_over(key: ApiKey, now_s: float) -> bool:
    """Whether a key has expired at ``now_s``, Unix seconds."""
    return key.expires_at is not None and key.expires_at.timestamp() <= now_s


class KeyRing:
    """Set of keys that give access, such as all API keys, or the admin token alone."""

    def __init__(
        self,
        keys: tuple[ApiKey, ...],
        *,
        what: str = "API key",
        required: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            what: names the keys in errors.
            required: whether nobody may enter without one; None: if there are any.
            clock: Unix seconds, by which keys expire.
        """
        self._known = [(digest, key) for key in keys for digest in key.hashes]
        self._what = what
        self._required = bool(keys) if required is None else required
        self._clock = clock

    def identify(self, presented: str | None) -> ApiKey | None:
        """Find the key that a client presented; None: anyone may enter. Raises Unauthorized if no
        key was presented, the ring does not have it, or it has expired."""
        if not self._required:
            return None
        if not presented:
            raise Unauthorized(
                f"No {self._what} was given. Send it in the header 'Authorization: Bearer ...'."
            )
        digest = hash_key(presented)
        found = None
        # Every key is compared, each in constant time, so the time tells an attacker nothing.
        for known, key in self._known:
            if hmac.compare_digest(digest, known):
                found = key
        if found is None:
            raise Unauthorized(
                f"This {self._what} is not known here. Check that it was copied whole, or ask "
                "the operator for a new one."
            )
        if is_over(found, self._clock()):
            raise Unauthorized(
                f"This {self._what} has expired. Ask the operator for a new one.",
                reason="expired_api_key",
            )
        return found


def may_use(key: ApiKey | None, model: str) -> bool:
    """Whether a key may use a model; None: no key is needed."""
    return key is None or not key.models or model in key.models


def usable_models(key: ApiKey | None, name: str, alias: Alias) -> dict[str, int]:
    """The models of an alias that a key's requests for it may go to, with their weights. A key that
    names the alias may use whatever it stands for. Any other gets of it what it may use anyway:
    what an alias is changed to gives no key a model that its operator did not."""
    if may_use(key, name):
        return dict(alias.models)
    return {model: weight for model, weight in alias.models.items() if may_use(key, model)}


def check_model(key: ApiKey | None, model: str) -> None:
    """Raise Forbidden if the key is for other models; None: no key is needed."""
    if key is not None and not may_use(key, model):
        raise Forbidden(
            f"this API key may not use model {model!r}; it may use: {', '.join(key.models)}",
            param="model",
        )


VARIABLES = {
    "admin_token_hash": "LOOMSERVE_ADMIN_TOKEN_HASH",
    "metrics_token_hash": "LOOMSERVE_METRICS_TOKEN_HASH",
}
"""By the field of ``server`` that each is for."""


def with_given_hashes(config: Config) -> Config:
    """The configuration with the environment's hashes for its own; StartError: a wrong one."""
    given = {
        field: _checked(variable, os.environ[variable])
        for field, variable in VARIABLES.items()
        if os.environ.get(variable) and getattr(config.server, field) is None
    }
    server = config.server.model_copy(update=given)
    if server.metrics_token_hash and server.metrics_token_hash == server.admin_token_hash:
        raise StartError(
            f"{VARIABLES['metrics_token_hash']} is the admin token's, which Prometheus should not "
            "have: make another one (loomserve key create)"
        )
    return config.model_copy(update={"server": server})


def _checked(variable: str, value: str) -> str:
    try:
        return TypeAdapter(KeyHash).validate_python(value)
    except ValidationError:
        raise StartError(
            f"{variable} is no hash such as loomserve key create prints (sha256:...)"
        ) from None

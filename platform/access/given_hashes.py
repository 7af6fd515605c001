"""Hashes of tokens that the environment gives, such as a Secret of Kubernetes."""

from __future__ import annotations

import os

from pydantic import TypeAdapter, ValidationError

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Config
from loomserve.platform.config.keys import KeyHash

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

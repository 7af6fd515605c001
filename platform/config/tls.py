"""The section ``server.tls``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from loomserve.platform.config.base import Section

FilePath = Annotated[str, Field(min_length=1)]


class Tls(Section):
    """The certificate by which the server speaks TLS (1.2 or 1.3)."""

    certificate: FilePath = Field(
        description="PEM file with the server's certificate and then those of its issuers, "
        "relative to this file. A new one is taken over within two seconds, without a restart.",
    )
    key: FilePath = Field(
        description="PEM file with its private key, not encrypted, that no other user can read.",
    )

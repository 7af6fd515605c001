"""The section ``models[].roles``."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.config.base import Section

LOCAL_PROMPT_TOKENS = 128


class Roles(Section):
    """Prefill and decode on replicas of their own; the KV passes through the store."""

    prefill: int = Field(
        ge=1, description="Replicas that compute prompts: those on the model's first devices."
    )
    decode: int = Field(
        ge=1,
        description="Replicas that generate tokens: those on the next devices; any others do both.",
    )
    local_prompt_tokens: int = Field(
        LOCAL_PROMPT_TOKENS,
        ge=0,
        description="A prompt of at most this length is computed where it is decoded.",
    )

"""The section ``server.usage``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from loomserve.platform.config.base import Section


class Usage(Section):
    """What each API key uses of each model, kept for accounting."""

    folder: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Folder with a file for each month, relative to this file; null: usage-PORT in "
        "the user's cache folder. On several nodes it should be one that all share.",
    )
    interval_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="How often lines are written; a gateway that is killed forgets so much.",
    )

"""What the command line's tables look like once they are printed."""

from __future__ import annotations

import re

from rich.console import Console, RenderableType


def printed(shown: RenderableType, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def rows(text: str) -> list[list[str]]:
    """The cells of each line that are not empty."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]

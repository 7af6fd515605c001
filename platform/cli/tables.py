"""Tables on the command line: narrow enough for 80 columns, and no cell cut short."""

from __future__ import annotations

import os

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

# A pipe has no width of its own; a row should be a line there.
_PIPE_COLUMNS = 240


def new_table(
    *names: str, numbers: tuple[str, ...] = (), title: str | None = None, whole: int = 1
) -> Table:
    """An empty table; ``numbers`` stand on the right, the first ``whole`` columns never fold."""
    made = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for at, name in enumerate(names):
        made.add_column(name, overflow="fold", no_wrap=at < whole)
    for name in numbers:
        made.add_column(name, overflow="fold", justify="right")
    return made


def stacked(*parts: RenderableType) -> Group:
    """One under the other, with an empty line between them."""
    return Group(*[each for part in parts for each in ("", part)][1:])


def display(shown: RenderableType) -> None:
    """Print it, to a pipe with whole lines."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PIPE_COLUMNS)
    console.print(shown)


def say(text: str) -> None:
    """Print a line as it is, however long."""
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a row in which no cell is taken for markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))

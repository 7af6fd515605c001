"""Tables on the command line: narrow enough for 80 columns, and no cell cut short."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

# A pipe has no width of its own; a row should be a line there.
_PIPE_COLUMNS = 240


class Figure(str):
    """A cell that stands on the right of its column, as integers do."""


Row = Mapping[str, str | int | Text]
"""Cells by the names of their columns, which all rows of a table have in the same order."""


def fixed(value: float | None, digits: int = 1) -> Figure:
    """A number with so many decimals; a dash for None."""
    return Figure("-" if value is None else f"{value:.{digits}f}")


def mebibytes(size: int | None) -> Figure:
    return fixed(None if size is None else size / 2**20, 0)


def table(
    title: str | None, rows: Iterable[Row], *, whole: int = 1, sections: bool = False
) -> Table | None:
    """A table, in which no cell is taken for markup; None if there are no rows. The first ``whole``
    columns never fold. With ``sections``, an empty line precedes each row whose first cell is not
    blank."""
    rows = list(rows)
    if not rows:
        return None
    made = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        show_edge=False,
    )  # fmt: skip
    for at, name in enumerate(rows[0]):
        right = any(isinstance(row[name], Figure | int) for row in rows)
        made.add_column(
            name, overflow="fold", no_wrap=at < whole, justify="right" if right else "left"
        )
    for row in rows:
        cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row.values()]
        if sections and cells[0]:
            made.add_section()
        made.add_row(*cells)
    return made


def stacked(*parts: RenderableType | None) -> Group:
    """One under the other, with an empty line between them; None is left out."""
    there = [part for part in parts if part is not None]
    return Group(*[each for part in there for each in ("", part)][1:])


def display(*parts: RenderableType | None) -> None:
    """Print them stacked, to a pipe with whole lines."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PIPE_COLUMNS)
    console.print(stacked(*parts))


def say(text: str) -> None:
    """Print a line as it is, however long."""
    Console(highlight=False, soft_wrap=True).print(text, markup=False)

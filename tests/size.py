"""How large the product's Python is: ``python -m tests.size``, which CI prints.

What is agreed stands in ``size.toml``. Beyond it nothing fails: it is for whoever reviews to see.
`tests/unit/test_architecture.py` has what fails.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CODE = ("platform", "deployments", "routers", "kvstore")
_AGREED = Path(__file__).with_name("size.toml")
_SHOWN = 5


class Sizes(NamedTuple):
    """Sizes of what there is, by name, in lines; of folders in files."""

    folders: Counter[str]
    files: Counter[str]
    classes: Counter[str]
    functions: Counter[str]
    packages: Counter[str]


def modules(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sizes() -> Sizes:
    found = Sizes(Counter(), Counter(), Counter(), Counter(), Counter())
    for path in modules(*CODE):
        name, text = name_of(path), path.read_text()
        parts = path.relative_to(ROOT).parts
        found.folders[name_of(path.parent)] += path.name != "__init__.py"
        found.files[name] = lines = len(text.splitlines())
        found.packages["/".join(parts[: 2 if parts[0] == "platform" else 1])] += lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                of = found.classes if isinstance(node, ast.ClassDef) else found.functions
                of[f"{name}:{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    return found


def main() -> None:
    agreed, found = tomllib.loads(_AGREED.read_text()), sizes()
    for kind in ("folders", "files", "classes", "functions"):
        most, of = agreed["most"][kind], getattr(found, kind)
        beyond = sum(size > most for size in of.values())
        print(f"largest {kind}; agreed {most}, beyond it {beyond} of {len(of)}")
        for name, size in of.most_common(_SHOWN):
            print(f"  {size:5} {name}")
    print("lines by package, and what is agreed")
    for name in sorted(found.packages.keys() | agreed["packages"].keys()):
        lines, was = found.packages[name], agreed["packages"].get(name, 0)
        print(f"  {lines:6} {was:6} {lines - was:+6} {name}")
    lines, was = found.packages.total(), sum(agreed["packages"].values())
    print(f"  {lines:6} {was:6} {lines - was:+6} in all")


if __name__ == "__main__":
    main()

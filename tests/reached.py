"""The tests that a change reaches, by who imports what: ``make quick``.

The change is what differs from where this branch left main, files that git does not know among it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import grimp

from tests.forks import forks, processes
from tests.rings import GROUPS, UNIT_PROCESSES

ROOT = Path(__file__).parents[1]
_PACKAGES = ("loomserve", "benchmarks", "dashboards", "tests")
_CACHE = ROOT / ".mypy_cache" / "imports"
# With fewer, to start a process would take longer than it saves.
_FILES_A_PROCESS = 3
# They read all files, and take seconds.
OF_ANY_CHANGE = ("tests/unit/test_architecture.py", "tests/unit/test_docs.py")


def changed() -> list[str]:
    """Files, relative to the repository's folder."""
    base = _git("merge-base", "HEAD", "main", check=False) or ["HEAD"]
    return _git("diff", "--name-only", *base) + _git("ls-files", "--others", "--exclude-standard")


def _git(*words: str, check: bool = True) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, check=check, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1]


def graph() -> grimp.ImportGraph:
    """Who imports what, tests among them; pytest imports their conftest.py for them."""
    # Where tools see the tree as the package that it is installed as.
    sys.path.insert(0, str(ROOT / "scripts/typing"))
    try:
        found = grimp.build_graph(*_PACKAGES, include_external_packages=True, cache_dir=str(_CACHE))
    finally:
        del sys.path[0]
    for module in only_tests(found.modules):
        folder = module
        while folder := folder.rpartition(".")[0]:
            if (conftest := f"{folder}.conftest") in found.modules:
                found.add_import(importer=module, imported=conftest)
    return found


def only_tests(modules: Iterable[str]) -> list[str]:
    """Those of the modules that are tests."""
    return sorted(
        module
        for module in modules
        if module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")
    )


def reached(files: Iterable[str], imports: grimp.ImportGraph) -> list[str]:
    """The files of tests that a change of these files reaches, those of engines among them."""
    found = set[str]()
    for file in files:
        module = module_of(file)
        if module is None:
            found.update(_readers(file))
        elif module in imports.modules:
            tests = only_tests({module} | imports.find_downstream_modules(module))
            found.update(f"{each.replace('.', '/')}.py" for each in tests)
    return sorted(found)


def module_of(file: str) -> str | None:
    """None: it is none of Python's."""
    name, is_python = file.removesuffix(".py"), file.endswith(".py")
    module = name.removesuffix("/__init__").replace("/", ".")
    if not is_python or module.partition(".")[0] in {"benchmarks", "dashboards", "tests"}:
        return module if is_python else None
    return f"loomserve.{module}"


def _readers(file: str) -> Iterator[str]:
    """Tests of the folder that mirrors its own, or one above that, and those that name it."""
    mirrors = (ROOT / "tests/unit" / each for each in Path(file).parents)
    mirror = next(each for each in mirrors if each.is_dir())
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        if test.parent == mirror or Path(file).name in test.read_text():
            yield str(test.relative_to(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", action="store_true", help="tests of real engines, too")
    parser.add_argument("files", nargs="*", help="instead of those that have changed")
    given = parser.parse_args()
    files = given.files or changed()
    if not files:
        print("nothing differs from main")
        return 0
    imports = graph()
    tests = sorted({*OF_ANY_CHANGE, *reached(files, imports)})
    units = [each for each in tests if each.startswith("tests/unit/")]
    others = [each for each in tests if each not in units]
    print(f"== {len(files)} files reach {len(units)} files of unit tests, {len(others)} others")
    pytest = [sys.executable, "-m", "pytest", "-m", "not slow"]
    number = min(UNIT_PROCESSES, len(units) // _FILES_A_PROCESS)
    imports_vllm = imports.find_downstream_modules("vllm") & {module_of(each) for each in units}
    with forks() if number > 1 and imports_vllm else nullcontext():
        several = [*processes(number), *GROUPS] if number > 1 else []
        status = subprocess.run([*pytest, *several, *units], cwd=ROOT, check=False).returncode
    if given.engines and others:
        status |= subprocess.run([*pytest, *others], cwd=ROOT, check=False).returncode
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())

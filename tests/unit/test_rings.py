"""Which tests run together, and that `make test` runs one of each claim of the README."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from tests import rings
from tests.claims import CLAIMS
from tests.groups import SHARED, group, put_in_group, put_in_order
from tests.rings import Part

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("runs of pytest")

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


class Marked(NamedTuple):
    where: str
    claims: list[str]
    names: set[str]
    """Of all its markers."""


def markers(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Of an expression, the names of pytest's markers, with the strings that they are given."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            given = [one.value for one in each.args if isinstance(one, ast.Constant)]
            yield each.func.attr, [one for one in given if isinstance(one, str)]
        elif isinstance(each, ast.Attribute):
            yield each.attr, []


def marked(file: Path) -> Iterator[Marked]:
    """The file's tests, and their parameters that have markers of their own."""
    tree = ast.parse(file.read_text())
    of_file = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(one, ast.Name) and one.id == "pytestmark" for one in node.targets)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            whole, parameters = list(of_file), []
            for decorator in node.decorator_list:
                if ast.unparse(decorator).startswith("pytest.mark.parametrize("):
                    parameters += [each for each in ast.walk(decorator) if is_parameter(each)]
                else:
                    whole.append(decorator)
            for parts in ([], *([each] for each in parameters)):
                found = [each for part in (*whole, *parts) for each in markers(part)]
                claims = [text for name, texts in found if name == "claim" for text in texts]
                where = f"{file.relative_to(TESTS)}::{node.name}"
                yield Marked(where, claims, {name for name, _ in found})


def is_parameter(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.param"


@functools.cache
def claiming() -> list[Marked]:
    """All that hold a claim."""
    files = [each for each in sorted(TESTS.rglob("test_*.py")) if ".claim(" in each.read_text()]
    return [each for file in files for each in marked(file) if each.claims]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_has_a_test_that_is_not_slow_and_of_real_engines(claim: str) -> None:
    of_claim = [each for each in claiming() if claim in each.claims]
    assert any(not each.names & {"slow", "simulated"} for each in of_claim)


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_the_readmes(claim: str) -> None:
    assert CLAIMS[claim] in (ROOT / "README.md").read_text()


def test_tests_hold_claims_that_there_are() -> None:
    named = {claim for each in claiming() for claim in each.claims}
    assert named - CLAIMS.keys() == set()


def test_fixtures_that_files_share_are_known() -> None:
    shared = r'^@pytest\.fixture\(scope="package"(?:, name="(\w+)")?\)\ndef (\w+)\((.*)'
    for conftest in TESTS.glob("*/conftest.py"):
        for name, function, given in re.findall(shared, conftest.read_text(), re.MULTILINE):
            assert (name or function) in SHARED or any(f"{one}:" in given for one in SHARED)


class Collected:
    """As much of a collected test as groups are made of."""

    def __init__(self, nodeid: str, *uses: str, has: tuple[str, ...] = (), group: str = "") -> None:
        self.nodeid = nodeid
        self.fixturenames = uses
        self.module = SimpleNamespace(**dict.fromkeys(has))
        self._marks = [pytest.mark.xdist_group(group).mark] if group else []
        put_in_group(cast(pytest.Item, self))

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self._marks if mark.name == name), None)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self._marks.append(marker.mark)


def group_of(*given: str, **more: Any) -> str:
    return group(cast(pytest.Item, Collected(*given, **more)))


def test_who_uses_what_files_share_is_with_the_others() -> None:
    assert group_of("tests/integration/test_a.py::test_x", "pair", "tmp_path") == "pair"
    assert group_of("tests/e2e/test_a.py::test_x[1]", "platform") == "platform"


def test_who_has_one_of_its_own_or_shares_nothing_is_with_its_file() -> None:
    own = group_of("tests/e2e/test_a.py::test_x", "platform", has=("platform",))
    assert own == "e2e/test_a.py"
    assert group_of("tests/integration/test_b.py::test_x", "tmp_path") == "integration/test_b.py"


def test_clusters_of_nodes_are_one_after_the_other_and_unit_tests_share_nothing() -> None:
    assert group_of("tests/cluster/test_a.py::test_x", "platform", has=("platform",)) == "cluster"
    assert group_of("tests/unit/test_a.py::test_x", "platform") == "unit/test_a.py"


def test_a_file_may_say_where_it_belongs() -> None:
    assert group_of("tests/e2e/test_a.py::test_x", "platform", group="mine") == "mine"


def test_unit_tests_and_large_groups_come_first_and_who_takes_the_platforms_models_away_last() -> (
    None
):
    e2e, unit = "tests/e2e/test_{}.py::test_{}", "tests/unit/test_{}.py::test_{}"
    items = [
        Collected(e2e.format("a", 1), "platform"),
        Collected(e2e.format("own", 1), "platform", has=("platform",)),
        Collected(unit.format("a", 1)),
        Collected(unit.format("u", 1)),
        Collected(unit.format("u", 2)),
        Collected(unit.format("named", 1), group="browser"),
        Collected(e2e.format("b", 1), "platform"),
    ]
    put_in_order(cast(list[pytest.Item], items))
    places = [group(cast(pytest.Item, item)) for item in items]
    units = ["browser", "unit/test_u.py", "unit/test_u.py", "unit/test_a.py"]
    assert places == [*units, "platform", "platform", "e2e/test_own.py"]


@pytest.fixture
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of pytest's would take a second for those that such tests do not use."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")


@pytest.mark.usefixtures("_few_plugins")
def test_each_part_is_run_and_its_time_told_whatever_came_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, outcome in (("bad", "False"), ("good", "True")):
        (tmp_path / f"test_{name}.py").write_text(f"def test_it():\n    assert {outcome}\n")
    parts = [
        Part(name, "not slow", (str(tmp_path / f"test_{name}.py"),)) for name in ("bad", "good")
    ]
    ways = {"ring": [parts], "beside": [*zip(parts)], "another": [parts[1:]]}
    monkeypatch.setattr(rings, "RINGS", ways)
    monkeypatch.setattr(rings, "COMPILED", ("dashboards",))
    monkeypatch.setattr(rings, "forks", nullcontext)
    for ring in ("ring", "beside"):
        assert rings.main([ring]) == 1
        said = capfd.readouterr().out
        told = re.findall(r"^== (.* in) \d+ s$", said, re.MULTILINE)
        assert told == ["bad: failed in", "good: passed in", "all failed in"]
        assert said.index("== bad\n") < said.index("assert False") < said.index("bad: failed")
    assert rings.main(["another"]) == 0


@pytest.mark.usefixtures("_few_plugins")
def test_few_tests_that_fail_are_run_again_alone_which_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pathlib, pytest\n"
        "@pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('name', ['a', 'b@c', 'd'])\n"
        "def test_it(name):\n"
        "    runs = pathlib.Path(__file__).with_name(name)\n"
        "    again = runs.exists()\n"
        "    runs.touch()\n"
        "    assert again or name == 'a'\n"
    )
    part = Part("it", "not slow", (str(tmp_path),), 1, rings.GROUPS)
    monkeypatch.setattr(rings, "RINGS", {"ring": ((part,),)})
    monkeypatch.setattr(rings, "COMPILED", ("dashboards",))
    monkeypatch.setattr(rings, "forks", nullcontext)
    assert rings.main(["ring"]) == 0
    (said,) = re.findall(r"^== it: (.*) in \d+ s$", capfd.readouterr().out, re.MULTILINE)
    assert re.fullmatch(r"passed, but only alone \S*\[b@c\], \S*\[d\],", said)
    monkeypatch.setattr(rings, "_MOST_AGAIN", 1)
    for runs in ("b@c", "d"):
        (tmp_path / runs).unlink()
    assert rings.main(["ring"]) == 1


@pytest.mark.usefixtures("_few_plugins")
def test_a_group_of_tests_stays_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, pytest\n"
        "pytestmark = pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_it(number):\n"
        "    pathlib.Path(__file__).with_name(f'{os.getpid()}.pid').touch()\n"
    )
    assert Part("it", "not slow", (str(tmp_path),), 2, rings.GROUPS).run().passed
    assert len([*tmp_path.glob("*.pid")]) == 1


@pytest.mark.parametrize("folder", ["unit", "integration", "e2e", "cluster"])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("marker", ["claim", "simulated", "heavy", ""])
def test_a_test_is_in_one_ring(folder: str, slow: bool, marker: str) -> None:
    marks = {"slow": slow} | {each: each == marker for each in ("claim", "simulated", "heavy")}
    found = [
        part.name
        for ring in rings.RINGS.values()
        for lane in ring
        for part in lane
        if f"tests/{folder}" in part.folders and eval(part.select, {}, marks)
    ]
    # Platforms alone are on simulated engines, and no unit test is all that there is of a claim.
    of_folder = {"unit": {"heavy"}, "integration": {"claim"}, "e2e": {"claim", "simulated"}}
    if marker == "" or marker in of_folder.get(folder, ()):
        assert len(found) == 1

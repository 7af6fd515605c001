"""`make quick` finds the tests that a change reaches."""

from __future__ import annotations

from pathlib import Path

import grimp
import pytest

from tests.reached import graph, module_of, only_tests, reached

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


@pytest.fixture(scope="module", name="imports")
def _imports() -> grimp.ImportGraph:
    return graph()


def test_a_module_reaches_its_own_tests_and_those_of_who_imports_it(
    imports: grimp.ImportGraph,
) -> None:
    found = reached(["platform/scheduling/policy/queue.py"], imports)
    assert "tests/unit/platform/scheduling/policy/test_scheduling.py" in found
    # By way of the scheduler's.
    assert "tests/unit/platform/scheduling/test_simulator.py" in found
    assert "tests/unit/kvstore/storage/test_arena.py" not in found


def test_a_test_reaches_itself_and_a_conftest_all_of_its_folder(imports: grimp.ImportGraph) -> None:
    own = "tests/unit/test_reached.py"
    assert reached([own], imports) == [own]
    units = {str(each.relative_to(ROOT)) for each in (TESTS / "unit").rglob("test_*.py")}
    assert units <= set(reached(["tests/unit/conftest.py"], imports))


def test_a_helper_of_tests_reaches_those_that_use_it(imports: grimp.ImportGraph) -> None:
    found = reached(["tests/e2e/predicted.py"], imports)
    assert "tests/e2e/test_lengths.py" in found
    assert "tests/e2e/test_keys.py" not in found


def test_what_is_not_python_reaches_who_names_it_and_the_folder_that_mirrors_its_own(
    imports: grimp.ImportGraph,
) -> None:
    assert "tests/unit/test_metrics.py" in reached(["docs/metrics.md"], imports)
    page = next((ROOT / "platform/http/console/static").glob("*.js"))
    found = reached([str(page.relative_to(ROOT))], imports)
    mirror = (TESTS / "unit/platform/http/console").glob("test_*.py")
    assert {str(each.relative_to(ROOT)) for each in mirror} <= set(found)


def test_what_is_gone_reaches_nothing_by_itself(imports: grimp.ImportGraph) -> None:
    assert reached(["platform/no_such_module.py"], imports) == []


def test_every_test_and_module_is_known(imports: grimp.ImportGraph) -> None:
    files = {module_of(str(each.relative_to(ROOT))) for each in TESTS.rglob("test_*.py")}
    assert files == set(only_tests(imports.modules))
    product = {module_of(str(each.relative_to(ROOT))) for each in (ROOT / "routers").rglob("*.py")}
    assert product <= {*imports.modules}

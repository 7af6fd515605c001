"""The table of hooks is whole and agrees with what is installed."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.engine import hooks
from loomserve.platform.engine.hooks import (
    TABLE,
    TESTED_VERSIONS,
    Hook,
    HookKind,
    Source,
    find_class,
    problems,
    verify,
)

ROOT = Path(__file__).parents[4]
CODE = ("platform", "deployments", "routers", "kvstore")
PRIVATE = re.compile(r"_(?!_)")
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))


def hook(target: str, *members: str) -> Hook:
    return Hook(target, members, HookKind.READ, "a test", "tests")


@pytest.mark.parametrize("one", TABLE, ids=lambda one: f"{one.owner}:{one.target}")
def test_what_is_installed_has_every_hook(one: Hook) -> None:
    assert list(problems(one)) == []
    assert (ROOT / one.owner).is_file()
    assert one.package in TESTED_VERSIONS


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (hook("vllm.v1.gone:Scheduler"), "there is no module vllm.v1.gone"),
        (hook("vllm.v1.core.sched.scheduler:Gone"), "vllm.v1.core.sched.scheduler has no Gone"),
        (hook(SCHEDULER, "gone"), "Scheduler has no gone"),
        (hook(SCHEDULER, "add_request(other)"), "add_request does not take (other)"),
        (hook(SCHEDULER, "running: set"), "running is of type list[Request], not set"),
        (hook(SCHEDULER, "finished_req_ids: set[int]"), "is of type set[str], not set[int]"),
        (hook("vllm.distributed.parallel_state", "gone"), "parallel_state has no gone"),
        (hook("vllm.v1.gone", "gone"), "there is no module vllm.v1.gone"),
    ],
)
def test_an_engine_without_a_hook_ends_at_its_start_and_says_what_is_gone(
    one: Hook, words: str
) -> None:
    with pytest.raises(StartError) as error:
        verify("vllm", [hook(SCHEDULER, "schedule"), one])
    assert words in str(error.value)
    assert f"install version {TESTED_VERSIONS['vllm'][0]}" in str(error.value)
    assert "schedule" not in str(error.value).partition("Gone:")[2].replace("sched.scheduler", "")


def test_what_was_found_whole_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [hook(SCHEDULER, "schedule(throttle_prefills)")]
    verify("vllm", table)
    monkeypatch.setattr(hooks, "problems", lambda _: pytest.fail("read again"))
    verify("vllm", table)


def test_inherited_members_and_attributes_set_by_methods_are_found() -> None:
    assert list(problems(hook("vllm.v1.worker.cpu_worker:CPUWorker", "model_runner"))) == []
    assert list(problems(hook("ray.serve.handle:DeploymentHandle", "choose_replica"))) == []


@pytest.mark.parametrize(
    ("body", "type_"),
    [
        ("errors: dict[str, int]", "dict[str, int]"),
        ("def __init__(self):\n  self.errors: set[str] = set()", "set[str]"),
        ("def __init__(self):\n  self.errors = set()", "set"),
        ("def __init__(self):\n  self.errors = {}\n  self.errors = made()", "dict"),
        ("def __init__(self):\n  self.others = set()", "unknown"),
    ],
)
def test_what_an_attribute_is_declared_as_or_made_by(body: str, type_: str) -> None:
    (node,) = ast.parse("class Made:\n " + body.replace("\n", "\n ")).body
    assert isinstance(node, ast.ClassDef)
    assert Source("vllm.made_up", node).type_of("errors") == type_


# What the product does, by its own source: each of it must stand in the table.


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> dict[str, tuple[str, str]]:
    """Of a file, local name to module and name there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def test_all_that_the_product_imports_is_installed() -> None:
    gone = []
    for file in (file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        for module, name in imports(file).values():
            if module.partition(".")[0] != "vllm":
                continue
            try:
                there = Source(module, hooks.module_tree(module)).has(name)
                if not there and module != "vllm":  # whose names are looked up late
                    hooks.module_path(f"{module}.{name}")
            except hooks.SourceError as error:
                gone.append(f"{file.relative_to(ROOT)}: {error}")
    assert gone == []


def bases(path: Path, node: ast.ClassDef) -> Iterator[Source | tuple[Path, ast.ClassDef]]:
    """Classes that it inherits from: vLLM's and Ray's, and our own with all of theirs."""
    here = {each.name: each for each in parsed(path).body if isinstance(each, ast.ClassDef)}
    for base in node.bases:
        name = getattr(base, "id", "")
        module, there = imports(path).get(name, ("", ""))
        if name in here:
            yield path, here[name]
            yield from bases(path, here[name])
        elif module.split(".")[0] in TESTED_VERSIONS:
            found = find_class(module, there)
            if found is not None:
                yield found
        elif module.startswith("loomserve."):
            home = ROOT / (module.removeprefix("loomserve.").replace(".", "/") + ".py")
            if home.is_file():
                for each in parsed(home).body:
                    if isinstance(each, ast.ClassDef) and each.name == there:
                        yield home, each
                        yield from bases(home, each)


def touched(path: Path, node: ast.ClassDef) -> set[str]:
    """Inherited members of vLLM's or Ray's that a class of ours overrides, reads or writes."""
    line = list(bases(path, node))
    theirs = [one for one in line if isinstance(one, Source)]
    ours = set(hooks._named(node.body))
    for one in line:
        if isinstance(one, tuple):
            ours |= {each.name for each in one[1].body if isinstance(each, ast.FunctionDef)}
    own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    names = set(hooks._named(node.body)) | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
        and (each.attr not in ours or each.attr in own)
    }
    return {name for name in names if any(one.has(name) for one in theirs)}


def subclasses() -> Iterator[tuple[str, ast.ClassDef, set[str], list[Source]]]:
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef):
                    theirs = [b for b in bases(path, node) if isinstance(b, Source)]
                    if theirs:
                        yield str(path.relative_to(ROOT)), node, touched(path, node), theirs


def line_of(source: Source) -> set[str]:
    return {f"{one.module}:{one.node.name}" for one in source.line()}


def test_the_table_has_every_member_that_a_subclass_touches() -> None:
    missing = []
    found = 0
    for owner, node, members, theirs in subclasses():
        found += 1
        line = set().union(*(line_of(source) for source in theirs))
        listed = {
            name
            for one in TABLE
            if one.owner == owner and one.target in line
            for member in one.members
            for name in [member.partition("(")[0].partition(": ")[0]]
        }
        if not any(one.owner == owner and one.target in line for one in TABLE):
            missing.append(f"{owner}: {node.name} is in no row")
        missing += [f"{owner}: {node.name}.{name}" for name in sorted(members - listed)]
    assert missing == []
    assert found > 20


def private_imports() -> Iterator[tuple[str, str, str]]:
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module, name in imports(path).values():
                parts = [*module.split("."), name]
                if parts[0] in TESTED_VERSIONS and any(PRIVATE.match(part) for part in parts):
                    yield str(path.relative_to(ROOT)), module, name


def test_the_table_has_everything_private_that_is_imported() -> None:
    targets = {one.target for one in TABLE} | {
        f"{one.target}:{member.partition('(')[0]}" for one in TABLE for member in one.members
    }
    missing = [
        f"{owner}: {module}:{name}"
        for owner, module, name in private_imports()
        if f"{module}:{name}" not in targets
    ]
    assert missing == []

"""Everything that Loomserve subclasses, reads or replaces inside vLLM and Ray, in one table.

vLLM and Ray promise none of it but what is marked ``PUBLIC``. :func:`verify` looks each name up in
the installed sources without importing them, so that an engine of another version ends at its
start, with a list of what is gone, and not in one of its steps. The table is ``hooks.toml``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import chain
from pathlib import Path

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder

_TESTED = "tested"


class HookKind(StrEnum):
    """How a hook reaches into vLLM or Ray, from what is promised to what is not."""

    PUBLIC = "public"
    SUBCLASS = "subclass"
    READ = "read"
    WRITE = "write"
    REPLACE = "replace"


@dataclass(frozen=True)
class Hook:
    """One place where Loomserve depends on the inside of vLLM or Ray, as ``hooks.toml`` says."""

    target: str
    members: tuple[str, ...]
    kind: HookKind
    why: str
    owner: str

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


def _read() -> tuple[dict[str, tuple[str, ...]], tuple[Hook, ...]]:
    with Path(__file__).with_name("hooks.toml").open("rb") as file:
        read = tomllib.load(file)
    tested = {package: tuple(versions) for package, versions in read.pop(_TESTED).items()}
    return tested, tuple(
        Hook(row["target"], tuple(row["members"]), HookKind(row["kind"]), row["why"], owner)
        for owner, rows in read.items()
        for row in rows
    )


TESTED_VERSIONS, TABLE = _read()
"""By package, the version that is pinned, then others that have all hooks; and all hooks."""


class SourceError(LookupError):
    """A module, class or member is not in the installed sources."""


@dataclass(frozen=True)
class Source:
    """A module's top level, or a class, as its source has it."""

    module: str
    node: ast.Module | ast.ClassDef

    def line(self) -> Iterator[Source]:
        """Itself, then what a class inherits from, as far as the package's sources go."""
        yield self
        for base in self.node.bases if isinstance(self.node, ast.ClassDef) else ():
            base = base.value if isinstance(base, ast.Subscript) else base
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            found = _class_by_local_name(self.module, name)
            if found is not None:
                yield from found.line()

    def has(self, member: str) -> bool:
        return any(member in _members(one.node) for one in self.line())

    def fields(self) -> Iterator[str]:
        for one in self.line():
            for node in one.node.body:
                match node:
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        if not ast.unparse(node.annotation).startswith("ClassVar"):
                            yield name

    def type_of(self, attribute: str) -> str:
        """What an attribute is declared as, in a class's body or where a method sets it, else what
        makes the value that it is first given: ``set`` of ``set()`` and ``{1}``."""
        given: ast.expr | None = None
        for node in chain.from_iterable(ast.walk(one.node) for one in self.line()):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
                    if name == attribute:
                        return ast.unparse(node.annotation)
                case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)]):
                    if name == attribute:
                        given = given or node.value
        if isinstance(given, ast.Call):
            return ast.unparse(given.func)
        return "unknown" if given is None else type(given).__name__.lower()

    def parameters(self, method: str) -> list[str]:
        """Names of a function's parameters, bound; empty for what is no function."""
        for one in self.line():
            for node in one.node.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
                    given = node.args
                    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                    return names[1:] if names[:1] in (["self"], ["cls"]) else names
        return []


def verify(package: str, table: Sequence[Hook] = TABLE) -> None:
    """See that the installed sources of ``vllm`` or ``ray`` have all that the table names. Sources
    that were found whole are not read again: that takes a second, and every engine asks. Raises
    StartError if something is gone; the message lists it, and says which version was tested."""
    table = [hook for hook in table if hook.package == package]
    stamp = cache_folder() / "hooks" / _digest(table)
    if stamp.exists():
        return
    gone = list(chain.from_iterable(problems(hook) for hook in table))
    if gone:
        raise StartError(
            f"the installed {package} lacks what Loomserve builds on; install version "
            f"{TESTED_VERSIONS[package][0]}, which it was tested with. Gone: {'; '.join(gone)}"
        )
    with suppress(OSError):  # it is then read again by the next engine
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def _digest(table: Sequence[Hook]) -> str:
    """Digest of the table and of the files that it was compared with."""
    digest = hashlib.sha256(repr(table).encode())
    for module in sorted({hook.target.partition(":")[0] for hook in table}):
        with suppress(SourceError):
            path = module_path(module)
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def problems(hook: Hook) -> Iterator[str]:
    """What of a hook the installed sources lack, one text each."""
    module, _, name = hook.target.partition(":")
    try:
        source = find_class(module, name) if name else Source(module, module_tree(module))
        if source is None:
            raise SourceError(f"{module} has no {name}")
    except SourceError as error:
        yield f"{error} ({hook.owner})"
        return
    for member in hook.members:
        member, _, type_ = member.partition(": ")
        called, _, parameters = member.rstrip(")").partition("(")
        wanted = parameters.split(", ") if parameters else []
        if not source.has(called):
            yield f"{hook.target} has no {called} ({hook.owner})"
        elif source.parameters(called)[: len(wanted)] != wanted:
            yield f"{hook.target}.{called} does not take ({parameters}) ({hook.owner})"
        elif type_ and type_ not in (kind := source.type_of(called), kind.partition("[")[0]):
            yield f"{hook.target}.{called} is of type {kind}, not {type_} ({hook.owner})"


def find_class(module: str, name: str) -> Source | None:
    """A class that an installed module defines or imports; raises as :func:`module_path`."""
    for node in module_tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return Source(module, node)
    return _class_by_local_name(module, name)


@cache
def _class_by_local_name(module: str, name: str) -> Source | None:
    for node in ast.walk(module_tree(module)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return Source(module, node)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                same_package = node.module.split(".")[0] == module.split(".")[0]
                if (alias.asname or alias.name) == name and same_package:
                    try:
                        return find_class(node.module, alias.name)
                    except SourceError:
                        return None
    return None


@cache
def module_tree(module: str) -> ast.Module:
    """A module's source, parsed and not imported; raises as :func:`module_path`."""
    return ast.parse(module_path(module).read_bytes())


def module_path(module: str) -> Path:
    """A module's file; raises ``SourceError`` if there is none."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)  # of a top-level package: it is not imported
    if spec is None or spec.origin is None:
        raise SourceError(f"{package} is not installed")
    path = Path(spec.origin).parent.joinpath(*rest)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    raise SourceError(f"there is no module {module}")


@cache
def _members(node: ast.Module | ast.ClassDef) -> frozenset[str]:
    """Names in the body, and attributes that a class's methods set on ``self``."""
    names = set(_named(node.body))
    for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            names.add(inner.attr)
    return frozenset(names)


def _named(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign():
                yield from (each.id for each in node.targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.If() | ast.Try():
                yield from _named([*node.body, *node.orelse])

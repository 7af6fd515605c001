"""Everything that Loomserve subclasses, reads or replaces inside vLLM and Ray, in one table.

vLLM and Ray promise none of it but what is marked ``PUBLIC``. :func:`verify` looks each name up in
the installed sources without importing them, so that an engine of another version ends at its
start, with a list of what is gone, and not in one of its steps. The table is ``hooks.toml``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.engine.hook_table import TABLE, TESTED_VERSIONS, Hook


class SourceError(LookupError):
    """A module, class or member is not in the installed sources."""


@dataclass(frozen=True)
class ClassSource:
    """A class as its source has it, with the classes that it inherits from in the same package."""

    module: str
    node: ast.ClassDef

    def line(self) -> Iterator[ClassSource]:
        """The class, then what it inherits from, as far as the package's sources go."""
        yield self
        for base in self.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            found = _class_by_local_name(self.module, name)
            if found is not None:
                yield from found.line()

    def has(self, member: str) -> bool:
        return any(member in _members(one.node) for one in self.line())

    def fields(self) -> Iterator[str]:
        """Names of a dataclass's fields."""
        for one in self.line():
            for node in one.node.body:
                match node:
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        if not ast.unparse(node.annotation).startswith("ClassVar"):
                            yield name

    def parameters(self, method: str) -> list[str]:
        """Names of a method's parameters, bound; empty for what is no method."""
        for one in self.line():
            for node in one.node.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
                    names = _parameters(node)
                    return names[1:] if names[:1] in (["self"], ["cls"]) else names
        return []


@dataclass(frozen=True)
class ModuleSource:
    """A module's top level as its source has it."""

    module: str

    def has(self, member: str) -> bool:
        return member in _top_level(self.module)

    def parameters(self, function: str) -> list[str]:
        for node in module_tree(self.module).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
                return _parameters(node)
        return []


def verify(package: str, table: Sequence[Hook] = TABLE) -> None:
    """See that the installed sources of ``vllm`` or ``ray`` have all that the table names.

    Sources that were found whole are not read again: that takes a second, and every engine asks.

    Raises:
        StartError: something is gone; the message lists it, and says which version was tested.
    """
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
    """Of the table and of the files that it was compared with."""
    digest = hashlib.sha256(repr(table).encode())
    for module in sorted({hook.target.partition(":")[0] for hook in table}):
        with suppress(SourceError):
            path = module_path(module)
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


def problems(hook: Hook) -> Iterator[str]:
    """What of a hook the installed sources do not have, one text each."""
    module, _, name = hook.target.partition(":")
    try:
        source = find_class(module, name) if name else ModuleSource(module)
        if source is None:
            raise SourceError(f"{module} has no {name}")
    except SourceError as error:
        yield f"{error} ({hook.owner})"
        return
    for member in hook.members:
        called, _, parameters = member.rstrip(")").partition("(")
        wanted = parameters.split(", ") if parameters else []
        # Versions of vLLM name some members otherwise, and some have none of them.
        names = called.removesuffix("?").split("|")
        there = next(filter(source.has, names), None)
        if there is None:
            if not called.endswith("?"):
                yield f"{hook.target} has no {called} ({hook.owner})"
        elif source.parameters(there)[: len(wanted)] != wanted:
            yield f"{hook.target}.{there} does not take ({parameters}) ({hook.owner})"


def find_class(module: str, name: str) -> ClassSource | None:
    """A class that a module of an installed package defines or imports.

    Raises:
        SourceError: there is no such module.
    """
    for node in module_tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ClassSource(module, node)
    return _class_by_local_name(module, name)


@cache
def _class_by_local_name(module: str, name: str) -> ClassSource | None:
    for node in ast.walk(module_tree(module)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ClassSource(module, node)
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
    """A module's source, parsed and not imported.

    Raises:
        SourceError: there is no such module.
    """
    return ast.parse(module_path(module).read_bytes())


def module_path(module: str) -> Path:
    """
    Raises:
        SourceError: there is no such module.
    """
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
def _top_level(module: str) -> frozenset[str]:
    return frozenset(_named(module_tree(module).body))


@cache
def _members(node: ast.ClassDef) -> frozenset[str]:
    """Names in a class's body, and attributes that its methods set on ``self``."""
    names = set(_named(node.body))
    for inner in ast.walk(node):
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


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]

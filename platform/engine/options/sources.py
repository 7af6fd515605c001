"""Values that modules of installed packages state, read without importing them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from loomserve.platform.engine.hooks import SourceError, module_tree


def literals_of(module: str, wanted: Callable[[str], bool]) -> dict[str, Mapping[str, Any]]:
    """Names at a module's top level that are tables of texts.

    Args:
        module: such as ``vllm.reasoning``.
        wanted: which names.

    Returns:
        Of each, its keys with their values, where these are plain ones; of a ``Literal``, its
        texts.

    Raises:
        SourceError: there is no such module, or no such name in it.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for node in module_tree(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as table):
                if wanted(name):
                    found[name] = _table(table)
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Subscript(slice=ast.Tuple() as of)
            ):
                if wanted(name):
                    found[name] = dict.fromkeys(filter(None, map(_text, of.elts)))
    if not found:
        raise SourceError(f"{module} has no such table")
    return found


def _table(table: ast.Dict) -> dict[str, Any]:
    return {
        name: value.value if isinstance(value, ast.Constant) else None
        for key, value in zip(table.keys, table.values, strict=True)
        if (name := _text(key)) is not None
    }


def _text(node: ast.expr | None) -> str | None:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return ast.literal_eval(node) if is_text and node is not None else None

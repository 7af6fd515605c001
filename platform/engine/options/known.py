"""Names that vLLM knows, of options and of some options' values.

They are read from its installed sources: importing it takes ten seconds.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.engine.hooks import SourceError, find_class, module_path, module_tree

_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:[-_][a-z0-9]+)*)((?:\.\w+)*)(=(?=\S))?")
_NAMES = {
    "quantization": ("vllm.model_executor.layers.quantization", "QuantizationMethods"),
    "reasoning_parser": ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER"),
    "tool_call_parser": ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
}
_REGISTRY = "vllm.model_executor.models.registry"
# Of classes of transformers': vLLM makes one of these into another.
_ENDINGS = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding",
    "EmbeddingModel", "ForSequenceClassification", "ForTokenClassification", "ClassificationModel",
    "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip


def check(model: str, options: Iterable[str]) -> None:
    """Refuse names that vLLM does not know. Raises ConfigError, which names the option and the
    nearest one that exists."""
    known = _all_names()
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"model {model!r}: engine option {option!r} is unknown to vLLM{hint}")


def is_option(name: str) -> bool:
    """Whether vLLM's server or its engine has an option of that name."""
    return name in _all_names()


def of_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that an engine takes, without those of its front end alone."""
    known = names_of_engine()
    return {name: value for name, value in options.items() if name in known}


def names_of_engine() -> frozenset[str]:
    return _fields("vllm.engine.arg_utils", "AsyncEngineArgs")


def _all_names() -> frozenset[str]:
    return names_of_engine() | _fields("vllm.entrypoints.launchers.cli_args", "FrontendArgs")


@cache
def _fields(module: str, name: str) -> frozenset[str]:
    found = find_class(module, name)
    assert found is not None, f"the table of hooks has {module}:{name}"
    return frozenset(found.fields())


def in_fields(text: str) -> str:
    """The text with ``--some-flag`` of vLLM's server as ``models[].engine.some_flag``. Environment
    variables (``VLLM_...``) and what is no option of vLLM's stay as they are."""
    return _FLAG.sub(_field, text) if "--" in text else text


def _field(found: re.Match[str]) -> str:
    name, inner, equals = found[1].replace("-", "_"), found[2], ": " if found[3] else ""
    if is_option(name):
        return f"models[].engine.{name}{inner}{equals}"
    without = name.removeprefix("no_")
    if without != name and is_option(without):
        return f"models[].engine.{without}: false"
    return found[0]


@cache
def architectures() -> frozenset[str]:
    """Architectures that vLLM has code of its own for."""
    gone = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")
    tables = literals_of(_REGISTRY, lambda name: name.endswith("_MODELS") and name not in gone)
    return frozenset(key for table in tables.values() for key in table)


def past_architectures() -> dict[str, str]:
    """Architectures that vLLM had, each with the last version that did."""
    (table,) = literals_of(_REGISTRY, lambda name: name == "_PREVIOUSLY_SUPPORTED_MODELS").values()
    return {name: str(version) for name, version in table.items()}


def is_known_architecture(name: str) -> bool:
    """Whether vLLM can compute it, if need be with transformers' code or a class made of it."""
    return (
        name in architectures()
        or f'"{name}"' in _text("transformers.models.auto.modeling_auto")
        or any(
            name.endswith(ending) and name.removesuffix(ending) + other in architectures()
            for ending in _ENDINGS
            for other in _ENDINGS
        )
    )


@cache
def names_for(option: str) -> frozenset[str]:
    """What ``quantization``, ``reasoning_parser`` or ``tool_call_parser`` may be."""
    module, name = _NAMES[option]
    (found,) = literals_of(module, lambda other: other == name).values()
    return frozenset(found)


def chat_templates() -> frozenset[str]:
    """Files of chat templates that vLLM brings along."""
    return frozenset(
        each.name
        for each in module_path("vllm.transformers_utils.chat_templates").parent.glob("*.jinja")
    )


@cache
def _text(module: str) -> str:
    return module_path(module).read_text(encoding="utf-8")


def literals_of(module: str, wanted: Callable[[str], bool]) -> dict[str, Mapping[str, Any]]:
    """Tables of texts at the top level of a module such as ``vllm.reasoning``. Of each wanted name
    its keys with their values, where these are plain ones; of a ``Literal`` its texts. Raises
    SourceError if there is no such module, or no such name in it."""
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
                    found[name] = dict.fromkeys(filter(None, map(_literal_text, of.elts)))
    if not found:
        raise SourceError(f"{module} has no such table")
    return found


def _table(table: ast.Dict) -> dict[str, Any]:
    return {
        name: value.value if isinstance(value, ast.Constant) else None
        for key, value in zip(table.keys, table.values, strict=True)
        if (name := _literal_text(key)) is not None
    }


def _literal_text(node: ast.expr | None) -> str | None:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return ast.literal_eval(node) if is_text and node is not None else None

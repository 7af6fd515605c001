"""Chooses vLLM's parsers of tool calls and of reasoning by what a model's files say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loomserve.platform.models.policy.families import REASONING, TOOL_CALLS, Family
from loomserve.platform.state.parsers import ChatParsers, ParserChoice

TOOL_CALL_PARSER = "tool_call_parser"
REASONING_PARSER = "reasoning_parser"
AUTO_TOOL_CHOICE = "enable_auto_tool_choice"

_CONFIGURED = "the configuration says"


@dataclass(frozen=True)
class ChatFiles:
    """What a model's files say of its chats."""

    template: str = ""
    """Its chat template; several are joined. Empty: it has none."""
    ending: str = ""
    """What it ends with where an answer begins; empty: that is not known."""
    model_type: str = ""
    architecture: str = ""
    """The first one of its configuration."""
    tokens: frozenset[str] = frozenset()
    """Those that its tokenizer has beside the vocabulary that it learnt."""
    packages: frozenset[str] = field(default_factory=frozenset)
    problem: str = ""
    """Why the files could not be read; empty: they were."""


def choose(files: ChatFiles, options: Mapping[str, Any]) -> ChatParsers:
    """The parsers of a model. One that engine ``options`` name is taken; null or empty: none."""
    if options.get("runner") == "pooling":
        nothing = ParserChoice(name=None, why="it writes no text")
        return ChatParsers(tool_call=nothing, reasoning=nothing)
    return ChatParsers(tool_call=_tool_call(files, options), reasoning=_reasoning(files, options))


def options_of(parsers: ChatParsers) -> dict[str, Any]:
    return {
        AUTO_TOOL_CHOICE: parsers.tool_call.name is not None,
        TOOL_CALL_PARSER: parsers.tool_call.name,
        REASONING_PARSER: parsers.reasoning.name or "",
    }


def _tool_call(files: ChatFiles, options: Mapping[str, Any]) -> ParserChoice:
    if options.get(AUTO_TOOL_CHOICE) is False:
        return ParserChoice(name=None, why=f"{_CONFIGURED} {AUTO_TOOL_CHOICE}: false")
    if TOOL_CALL_PARSER in options:
        return ParserChoice(name=options[TOOL_CALL_PARSER] or None, why=_CONFIGURED)
    found = _first(TOOL_CALLS, files)
    if found.name is not None and "tools" not in files.template and files.template:
        return ParserChoice(
            name=found.name,
            why=f"{found.why}; it writes no tools, so the model is not told of a request's",
        )
    return found


def _reasoning(files: ChatFiles, options: Mapping[str, Any]) -> ParserChoice:
    nested = options.get("structured_outputs_config")
    for given in (options, nested if isinstance(nested, Mapping) else {}):
        if REASONING_PARSER in given:
            return ParserChoice(name=given[REASONING_PARSER] or None, why=_CONFIGURED)
    return _first(REASONING, files)


def _first(families: Sequence[Family], files: ChatFiles) -> ParserChoice:
    if files.problem:
        return ParserChoice(name=None, why=files.problem)
    lacking = ""
    for family in families:
        if not _is_of(family, files):
            continue
        missing = [each for each in family.tokens if each not in files.tokens]
        if missing:
            lacking = lacking or f"{family.parser} needs the token {missing[0]}"
        elif family.package and family.package not in files.packages:
            lacking = lacking or f"{family.parser} needs the package {family.package}"
        else:
            return ParserChoice(name=family.parser, why=_why(family, files))
    return ParserChoice(name=None, why=lacking or "neither template nor architecture tells")


def _is_of(family: Family, files: ChatFiles) -> bool:
    named = not family.models or bool(family.models & {files.model_type, files.architecture})
    written = all(mark in files.template for mark in family.marks)
    others = any(mark in files.template for mark in family.without)
    return named and written and not others and files.ending.rstrip().endswith(family.ending)


def _why(family: Family, files: ChatFiles) -> str:
    if family.models:
        kind = files.model_type if files.model_type in family.models else files.architecture
        return f"architecture {kind}"
    return "the template writes " + " and ".join(family.marks or (family.ending,))

"""What a model's files say of its chats: template, architecture, tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loomserve.platform.base.plain_reason import first_line
from loomserve.platform.models.policy.families import REASONING, TOOL_CALLS
from loomserve.platform.models.policy.parsers import ChatFiles, choose
from loomserve.platform.state.parsers import ChatParsers

_FILES = (
    *("config.json", "params.json", "tokenizer_config.json", "tokenizer.json", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
_SHOWN_END = 100
_CONVERSATION = [{"role": "user", "content": "Hello."}]


def choose_parsers(
    path: Path | str, options: Mapping[str, Any], *, revision: str | None = None
) -> ChatParsers:
    """vLLM's parsers of a model's tool calls and reasoning, by its files and engine ``options``."""
    tokenizer = options.get("tokenizer")
    try:
        folder = path if isinstance(path, Path) else _from_hub(path, revision, here_only=True)
        words = Path(tokenizer) if tokenizer and Path(tokenizer).is_dir() else folder
        files = _read(folder, words, options)
    except Exception as error:  # of files, or of the hub's client: a model does without parsers
        files = ChatFiles(problem=f"its files cannot be read: {first_line(error)[:200]}")
    return choose(files, options)


def fetch_from_hub(name: str, revision: str | None) -> None:
    """Fetch the files of a hub id that parsers are chosen by, if the hub gives them."""
    # Engines will say what is wrong with the hub or the id: they need the weights.
    with suppress(Exception):
        _from_hub(name, revision, here_only=False)


def _from_hub(name: str, revision: str | None, here_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        name, revision=revision, allow_patterns=[*_FILES], local_files_only=here_only
    )
    return Path(found)


def _read(folder: Path, words: Path, options: Mapping[str, Any]) -> ChatFiles:
    config = _json(folder / "config.json")
    settings = _json(words / "tokenizer_config.json")
    templates = _templates(folder, words, settings, options)
    architectures = config.get("architectures")
    return ChatFiles(
        template="\n".join(templates),
        ending=_ending(templates[0], settings) if templates else "",
        model_type=str(config.get("model_type") or ""),
        architecture=str(architectures[0]) if isinstance(architectures, list) else "",
        tokens=frozenset(_tokens(words, settings)),
        packages=frozenset(
            each.package
            for each in TOOL_CALLS + REASONING
            if each.package and find_spec(each.package)
        ),
    )


def _templates(
    folder: Path, words: Path, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    """The template of chats without tools first."""
    given = options.get("chat_template")
    if isinstance(given, str) and given:
        literal = any(each in given for each in "{}\n")
        return [given if literal else Path(given).read_text(encoding="utf-8")]
    files = [words / "chat_template.jinja", folder / "chat_template.jinja"]
    files += sorted(words.glob("additional_chat_templates/*.jinja"))
    found = [file.read_text(encoding="utf-8") for file in dict.fromkeys(files) if file.is_file()]
    for said in (settings, _json(folder / "chat_template.json")):
        found += _named(said.get("chat_template"))
    if found or not (words / "tekken.json").is_file():
        return found
    # Mistral's own tokenizer writes its form without a template.
    return ["tools " + " ".join(_tekken(words))]


def _named(said: Any) -> list[str]:
    if isinstance(said, str):
        return [said]
    if not isinstance(said, list):
        return []
    named = {str(each.get("name")): each.get("template") for each in said if isinstance(each, dict)}
    ordered = sorted(named, key=lambda name: name != "default")
    return [text for name in ordered if isinstance(text := named[name], str)]


def _tokens(folder: Path, settings: Mapping[str, Any]) -> set[str]:
    added = settings.get("added_tokens_decoder")
    entries = list(added.values()) if isinstance(added, dict) else []
    entries += _tokens_in(folder / "tokenizer.json").added_tokens
    found = {str(each.get("content")) for each in entries if isinstance(each, dict)}
    return found | set(_tekken(folder))


def _tekken(folder: Path) -> list[str]:
    entries = _tokens_in(folder / "tekken.json").special_tokens
    return [str(each.get("token_str")) for each in entries if isinstance(each, dict)]


class _Tokenizer(msgspec.Struct):
    """What is wanted of files of tens of megabytes, of which the rest is not kept."""

    added_tokens: list[Any] = []
    special_tokens: list[Any] = []


def _tokens_in(path: Path) -> _Tokenizer:
    if not path.is_file():
        return _Tokenizer()
    return msgspec.json.decode(path.read_bytes(), type=_Tokenizer)


def _ending(template: str, settings: Mapping[str, Any]) -> str:
    """What a prompt ends with; empty where the template cannot be rendered like this."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = json.dumps
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    try:
        rendered = environment.from_string(template).render(
            messages=_CONVERSATION,
            add_generation_prompt=True,
            strftime_now=lambda _: "",
            **{each: settings[each] for each in names if isinstance(settings.get(each), str)},
        )
    except Exception:  # a template is a program, which may fail in any way
        return ""
    return rendered[-_SHOWN_END:]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}

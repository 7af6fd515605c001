"""What a request asks for is obeyed or refused.

vLLM ignores unknown fields. Here a field that would change the answer and is not obeyed is refused.
Fields without effect are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    PASSED_ON,
    RESPONSES,
    TEXT_ENDPOINTS,
    WITHOUT_EFFECT,
    names,
)
from loomserve.platform.requests.policy.refused_fields import (
    EMPTY_ASKS,
    OFF,
    OFF_VALUES,
    REFUSED,
    REFUSED_EMBEDDINGS,
    REFUSED_FORMS,
    here,
    is_off,
)

_OF_TEXT = frozenset(chain.from_iterable(PASSED_ON[path] for path in TEXT_ENDPOINTS))
_THINKING = "thinking"
# The switch of Anthropic's thinking is passed on to the template; what context_management clears
# are old results, and Claude Code sends it.
_OF_MESSAGES = frozenset({_THINKING, "context_management"})
_TAKEN: Mapping[str, frozenset[str]] = {
    path: passed | WITHOUT_EFFECT | (_OF_MESSAGES if path == MESSAGES else frozenset())
    for path, passed in PASSED_ON.items()
}

# Of a beam search vLLM obeys n, the bounds of the length, temperature and length_penalty.
_NOT_OF_BEAMS = names("""
    response_format structured_outputs stop stop_token_ids min_tokens logit_bias bad_words
    allowed_token_ids top_p top_k min_p seed presence_penalty frequency_penalty
    repetition_penalty thinking_token_budget prompt_logprobs repetition_detection
    """)
_BEAMS_OFF: Mapping[str, tuple[Any, ...]] = {"top_p": (1,), "response_format": ({"type": "text"},)}

# How DeepSeek, Mistral and Moonshot mark an answer that is to go on.
_PREFIXES = ("prefix", "partial")

# In a text quotes are escaped, so none can pass for a name.
_MARKED = re.compile(rb'"(prefix|partial)"\s*+:\s*+true')
_EMPTY = (b"null", b"[]", b"{}", b'""')
_LOGPROBS = "message.output_text.logprobs"

# Tools of which a client runs the function itself, by their type.
_FUNCTIONS: Mapping[str, tuple[str | None, ...]] = {
    CHAT: (None, "function"),
    RESPONSES: ("function", "namespace"),
    MESSAGES: (None, "custom"),
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    CHAT: ("function",),
    RESPONSES: ("function",),
    MESSAGES: ("auto", "any", "tool", "none"),
}


def check_obeyed(
    path: str, fields: Mapping[str, Any], texts: Mapping[str, bytes] | None = None
) -> None:
    """Check a request to one of vLLM's endpoints; ``texts`` are fields left as JSON. Raises
    BadRequest for a field that would change the answer and is not obeyed."""
    if path not in PASSED_ON:
        return
    refused = REFUSED_EMBEDDINGS if path == EMBEDDINGS else REFUSED
    left = {
        name: text
        for name, text in (texts or {}).items()
        if text not in _EMPTY or (text == b"{}" and name in EMPTY_ASKS)
    }
    for name, value in chain(fields.items(), left.items()):
        if name in _TAKEN[path]:
            continue
        if (known := refused.get(name)) is not None:
            # As many candidates as answers: it chooses nothing.
            if not (known.is_off(value) or (name == "best_of" and value == fields.get("n"))):
                raise _not_obeyed(name, known.instead)
        elif (
            path != EMBEDDINGS and name in _OF_TEXT and not is_off(value, OFF_VALUES.get(name, OFF))
        ):
            raise _not_obeyed(name, f"it is no field of {path}: {here(path, name)}")
    if fields.get("use_beam_search") is True:
        _check_beams(fields)
    text = fields.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    for name, value in (("response_format", fields.get("response_format")), ("text.format", form)):
        _check_format(name, value)
    if path == CHAT:
        _check_prefix(fields.get("messages"), left.get("messages"))
    if path in _FUNCTIONS:
        _check_tools(path, fields)
    if path == RESPONSES:
        _check_response(fields)
    given = fields.get(_THINKING)
    kind = given.get("type") if isinstance(given, dict) else given
    if path == MESSAGES and given is not None and kind not in ("enabled", "disabled", "adaptive"):
        raise BadRequest(
            'thinking must be an object of the type "enabled", "adaptive" or "disabled"',
            param=_THINKING,
        )


def check_form_obeyed(fields: Mapping[str, Any]) -> None:
    """The same of a form."""
    for name, known in REFUSED_FORMS.items():
        searched = name == "n" and fields.get("use_beam_search") is True
        if not searched and not known.is_off(fields.get(name)):
            raise _not_obeyed(name, known.instead)


def thinking(path: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields to add, by which a model's template obeys Anthropic's ``thinking``."""
    given = fields.get(_THINKING)
    own = fields.get("chat_template_kwargs")
    if path != MESSAGES or not isinstance(given, dict) or not isinstance(own, dict | None):
        return {}
    name = "enable_thinking"
    if name in (own or {}):
        return {}
    return {"chat_template_kwargs": {**(own or {}), name: given.get("type") != "disabled"}}


# Values that ask for nothing and that vLLM fails on, with those that it takes for the same.
_NOTHING: Mapping[tuple[str, str], tuple[Any, Any]] = {
    (COMPLETIONS, "suffix"): ("", None),
    (RESPONSES, "truncation"): (None, "disabled"),
}


def asking_nothing(path: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields to add in the place of those that ask for nothing and would be refused."""
    return {
        name: taken
        for (where, name), (given, taken) in _NOTHING.items()
        if path == where and name in fields and fields[name] == given
    }


def _check_beams(fields: Mapping[str, Any]) -> None:
    for name in sorted(_NOT_OF_BEAMS):
        off = _BEAMS_OFF.get(name) or OFF_VALUES.get(name, OFF)
        if name in fields and not is_off(fields[name], off):
            raise _not_obeyed(name, "a beam search does not look at it: leave out one of the two")


def _check_format(name: str, value: Any) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("json_object", "text"):
        return
    for inner in ("schema", "json_schema"):
        if value.get(inner):
            raise _not_obeyed(f"{name}.{inner}", f'{name}.type "json_schema" obeys a schema')


def _check_prefix(messages: Any, left: bytes | None) -> None:
    marked = set(_MARKED.findall(left)) if left is not None else set()
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            marked |= {name.encode() for name in _PREFIXES if message.get(name) is True}
    if marked:
        raise _not_obeyed(
            f"messages[].{min(marked).decode()}",
            "an answer goes on with continue_final_message: true and add_generation_prompt: false",
        )


def _check_tools(path: str, fields: Mapping[str, Any]) -> None:
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(tool, dict) and kind not in _FUNCTIONS[path]:
            raise _not_obeyed(
                f"tools[{number}]",
                f"nobody runs a tool of the type {str(kind)[:64]!r} here; describe a function, and "
                "run it yourself",
            )
    if not isinstance(choice, dict):
        return
    if choice.get("type") not in _CHOICES[path]:
        raise _not_obeyed(
            "tool_choice",
            "it chooses among functions only: list in tools those that may be called, and name one "
            "or require any",
        )
    if path == MESSAGES and not tools and choice["type"] in ("any", "tool"):
        raise _not_obeyed("tool_choice", "there are no tools to call; give tools")


def _check_response(fields: Mapping[str, Any]) -> None:
    text = fields.get("text")
    verbosity = text.get("verbosity") if isinstance(text, dict) else None
    if not REFUSED["verbosity"].is_off(verbosity):
        raise _not_obeyed("text.verbosity", REFUSED["verbosity"].instead)
    include = fields.get("include")
    if fields.get("top_logprobs") and not (isinstance(include, list) and _LOGPROBS in include):
        raise _not_obeyed("top_logprobs", f'it needs include: ["{_LOGPROBS}"]')


def _not_obeyed(name: str, instead: str) -> BadRequest:
    return BadRequest(f"{name} would not be obeyed; {instead}", param=name)

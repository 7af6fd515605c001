"""How many sequences one request has computed, and how long each may be.

One reading for all that counts: limits, queues, the batch lane, predictions of lengths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.fields import COMPLETIONS, EMBEDDINGS

MOST_EMBEDDINGS = 1024
"""Texts of one request for embeddings, as vLLM bounds prompts."""

PROMPTS: Mapping[str, tuple[str, ...]] = {
    COMPLETIONS: ("prompt", "prompt_embeds"),
    EMBEDDINGS: ("input",),
}
"""Fields with several prompts, each of which is answered."""
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

_FIRST = re.compile(rb"\s*\[\s*(.)", re.DOTALL)
# Possessive, so that no text takes more than one pass.
_TOKENS = re.compile(rb"\s*+\[[-\d,\s]*+\]\s*+")
_LISTS_OF_TOKENS = re.compile(rb"\s*+\[(?:\s*+\[[-\d,\s]*+\]\s*+,?)*+\s*+\]\s*+")


def answers(fields: Mapping[str, Any]) -> int:
    """Answers to each prompt; what is refused counts as one."""
    n = fields.get("n")
    return max(1, n) if type(n) is int else 1


def longest(fields: Mapping[str, Any]) -> int | None:
    """The most tokens that the request allows an answer; None: it names no limit."""
    given = (fields.get(name) for name in LENGTHS)
    return next((n for n in given if type(n) is int and n > 0), None)


def prompts_in(value: Any) -> int:
    """Prompts in the field of a request that was read; none in null, at least one otherwise."""
    if value is None:
        return 0
    if not isinstance(value, list) or not value or not isinstance(value[0], list | str):
        return 1
    return len(value)


def prompts_in_json(text: bytes) -> int:
    """The same of a field that was left as JSON."""
    first = _FIRST.match(text)
    if first is None:
        return 0 if text.strip() == b"null" else 1
    if first[1] == b"[":
        return max(1, text.count(b"]") - 1)
    if first[1] == b'"':
        try:
            return len(msgspec.json.decode(text, type=list[str]))
        except msgspec.DecodeError:
            return max(1, text.count(b'"') // 2)
    return 1


def check_prompts(
    path: str, fields: Mapping[str, Any], texts: Mapping[str, bytes] | None = None
) -> None:
    """Check that each list of prompts has one reading; ``texts`` are fields left as JSON.

    vLLM takes a list with numbers among its texts, or with true, for one prompt of tokens.

    Raises:
        BadRequest: a list is neither of texts, of tokens, of lists of tokens, nor of messages.
    """
    for name in PROMPTS.get(path, ()):
        if name in fields:
            uniform = _is_uniform(fields[name])
        else:
            uniform = _is_uniform_json((texts or {}).get(name, b"null"))
        if not uniform:
            raise BadRequest(
                f"{name} must be a text, a list of texts, a list of token ids, or a list of lists "
                "of token ids, not a mixture",
                param=name,
            )


def _is_uniform(value: Any) -> bool:
    if not isinstance(value, list):
        return True
    kinds = set(map(type, value))
    if kinds != {list}:
        return kinds in (set(), {str}, {int}, {dict})
    inner = set().union(*(map(type, one) for one in value))
    return inner in (set(), {int}, {dict})


def _is_uniform_json(text: bytes) -> bool:
    first = _FIRST.match(text)
    if first is None or first[1] in b"]{":
        return True
    if first[1] == b"[":
        return _LISTS_OF_TOKENS.fullmatch(text) is not None or b"{" in text
    if first[1] != b'"':
        return _TOKENS.fullmatch(text) is not None
    try:
        msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        return False
    return True

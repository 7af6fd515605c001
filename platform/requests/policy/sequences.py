"""How many sequences one request has computed, and how long each may be.

Limits, queues, the batch lane and predictions of lengths all count by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.endpoints import Counted, Endpoint
from loomserve.platform.requests.policy.fields import COMPLETIONS, EMBEDDINGS

MOST_EMBEDDINGS = 1024
"""Texts of one request for embeddings, as vLLM bounds prompts."""

PROMPTS: Mapping[str, tuple[str, ...]] = {
    COMPLETIONS: ("prompt", "prompt_embeds"),
    EMBEDDINGS: ("input",),
    "/v1/detokenize": ("tokens",),
}
"""Fields with several prompts, or with tokens."""
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

_FIRST = re.compile(rb"\s*\[\s*(.)", re.DOTALL)
# Possessive, so that no text takes more than one pass.
_TOKENS = re.compile(rb"\s*+\[[-\d,\s]*+\]\s*+")
_LISTS_OF_TOKENS = re.compile(rb"\s*+\[(?:\s*+\[[-\d,\s]*+\]\s*+,?)*+\s*+\]\s*+")
# To count the entries of a longer list takes a tenth of a second, and no limit allows as many.
_MOST_COUNTED = 2**18


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
    """Raises BadRequest for a list of prompts that mixes texts, tokens, lists of tokens or
    messages; ``texts`` are fields left as JSON. vLLM takes a list with numbers among its texts, or
    with true, for one prompt of tokens."""
    for name in PROMPTS.get(path, ()):
        if name in fields:
            uniform = _is_uniform(fields[name])
        else:
            uniform = _is_uniform_json((texts or {}).get(name, b"null"))
        if not uniform:
            kinds = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
            if name == "tokens":
                kinds = "a list of token ids"
            raise BadRequest(f"{name} must be {kinds}, not a mixture", param=name)


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


def documents_in(value: Any) -> int:
    """Documents in a field that was read; at least one."""
    return max(1, len(value)) if isinstance(value, list) else 1


def documents_in_json(text: bytes) -> int:
    """The same of a field that was left as JSON."""
    commas = text.count(b",")
    if commas > _MOST_COUNTED and text.lstrip().startswith(b"["):
        return commas + 1
    try:
        return max(1, len(msgspec.json.decode(text, type=list[msgspec.Raw])))
    except msgspec.DecodeError:
        return 1


def texts_to_compute(
    endpoint: Endpoint, fields: Mapping[str, Any], left: Mapping[str, bytes]
) -> int:
    """Prompts, texts or documents of a request; ``left`` are the fields that are still JSON."""
    pairs = endpoint.counted is Counted.DOCUMENTS
    read, parsed = (documents_in, documents_in_json) if pairs else (prompts_in, prompts_in_json)
    found = [parsed(left[name]) for name in endpoint.lists if name in left]
    found += [read(fields[name]) for name in endpoint.lists if name in fields]
    return max(found, default=1) if pairs else sum(found) or 1


def sequences(
    endpoint: Endpoint, fields: Mapping[str, Any], left: Mapping[str, bytes] | None = None
) -> int:
    """What counts of a request in limits and queues: one reading for all that counts."""
    if endpoint.counted is Counted.ONE:
        return 1
    texts = texts_to_compute(endpoint, fields, left or {})
    return texts * answers(fields) if endpoint.counted is Counted.ANSWERS else texts


def check_number(
    endpoint: Endpoint, fields: Mapping[str, Any], left: Mapping[str, bytes], most: int
) -> None:
    """Raises BadRequest for more than ``most`` sequences, or texts than vLLM embeds."""
    texts, number = texts_to_compute(endpoint, fields, left), sequences(endpoint, fields, left)
    param = next((name for name in endpoint.lists if name in fields or name in left), None)
    if endpoint.counted is Counted.ONE and texts > MOST_EMBEDDINGS:
        raise BadRequest(
            f"{param} has {texts} texts, of which one request may have {MOST_EMBEDDINGS}; send "
            "several",
            param=param,
        )
    if number <= most:
        return
    if endpoint.counted is Counted.DOCUMENTS:
        raise BadRequest(
            f"the request has {number} documents, of which one may have {most}; send several "
            "requests, or ask the operator to raise server.max_sequences",
            param=param,
        )
    raise BadRequest(
        f"{texts} prompts with {answers(fields)} answers each are {number} sequences, of which one "
        f"request may have {most}; send several requests",
        param="n" if texts <= most else "prompt",
    )

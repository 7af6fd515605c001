"""How many sequences one request has computed: its prompts, times the answers to each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

MOST_EMBEDDINGS = 1024
"""Texts of one request for embeddings, as vLLM bounds prompts."""

_FIRST = re.compile(rb"\s*\[\s*(.)", re.DOTALL)


def answers(fields: Mapping[str, Any]) -> int:
    """Answers to each prompt; what vLLM will refuse counts as one."""
    n = fields.get("n")
    if isinstance(n, str):
        n = int(n) if n.strip().isdecimal() and len(n) < 10 else 1
    return max(1, int(n)) if isinstance(n, int | float) and abs(n) < 2**31 else 1


def prompts_in(value: Any) -> int:
    """Prompts in the field of a request that was read; at least one."""
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return 1
    return len(value)


def prompts_in_json(text: bytes) -> int:
    """The same of a field that was left as JSON; mixed lists, which vLLM refuses, count anyhow."""
    first = _FIRST.match(text)
    if first is None:
        return 1
    if first[1] == b"[":
        return max(1, text.count(b"]") - 1)
    if first[1] == b'"':
        try:
            return len(msgspec.json.decode(text, type=list[str]))
        except msgspec.DecodeError:
            return max(1, text.count(b'"') // 2)
    return 1

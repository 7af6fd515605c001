"""How many texts a request has, of which each is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.endpoints import Counted, Endpoint
from loomserve.platform.requests.policy.sequences import (
    MOST_EMBEDDINGS,
    answers,
    prompts_in,
    prompts_in_json,
)

# To count the entries of a longer list takes a tenth of a second, and no limit allows as many.
_MOST_COUNTED = 2**18


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
    """
    Raises:
        BadRequest: more than ``most`` sequences, or texts to embed than vLLM takes.
    """
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

"""How many entries a request's fields may have, how long its stop texts, how large its numbers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from loomserve.platform.base.errors import BadRequest

MOST_FIELDS = 256
MOST_ENTRIES = 1024
"""Of a list or object in a field, and of each directly within it."""
MOST_BAD_WORDS = 128
MOST_BAD_WORD_CHARACTERS = 64
"""vLLM tokenises each twice, on the event loop, before it looks how many there are."""
MOST_STOP_CHARACTERS = 1024
"""Of one text that ends an answer."""

# As many as a vocabulary has tokens. Nothing looks at each on its own.
_MOST = {"allowed_token_ids": 2**18, "bad_words": MOST_BAD_WORDS}
_CHARACTERS = {
    "bad_words": MOST_BAD_WORD_CHARACTERS,
    "stop": MOST_STOP_CHARACTERS,
    "stop_sequences": MOST_STOP_CHARACTERS,
}
_LEAST_NUMBER, _MOST_NUMBER = -(2**63), 2**63 - 1


def check_lists(fields: Mapping[str, Any], but: Container[str] = ()) -> None:
    """Raises BadRequest if a field that is not in ``but`` has too many or too long entries."""
    if len(fields) > MOST_FIELDS:
        raise BadRequest(
            f"the request has {len(fields)} fields, of which it may have {MOST_FIELDS}"
        )
    for name, value in fields.items():
        if name in but:
            continue
        _check_entries(value, name, _MOST.get(name, MOST_ENTRIES))
        if name in _CHARACTERS:
            _check_characters(value, name, _CHARACTERS[name])


def _check_entries(value: Any, name: str, most: int) -> None:
    if not isinstance(value, dict | list):
        return
    if len(value) > most:
        raise _too_many(name, len(value), most)
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list) and len(one) > MOST_ENTRIES:
            raise _too_many(name, len(one), MOST_ENTRIES)


def _check_characters(value: Any, name: str, most: int) -> None:
    for text in value if isinstance(value, list) else (value,):
        if isinstance(text, str) and len(text) > most:
            raise BadRequest(
                f"{name} has a text of {len(text)} characters, of which {most} are allowed; give "
                "a shorter one",
                param=name,
            )


def _too_many(name: str, entries: int, most: int) -> BadRequest:
    return BadRequest(
        f"{name} has {entries} entries, of which {most} are allowed; give fewer", param=name
    )


def check_numbers(fields: Mapping[str, Any], but: Container[str] = ()) -> None:
    """Raises BadRequest for a number beyond 64 bits in a field that is not in ``but``."""
    for name, value in fields.items():
        # vLLM makes whole numbers of some fractions.
        if isinstance(value, int | float):
            if value < _LEAST_NUMBER or value > _MOST_NUMBER:
                raise _too_large(name)
        elif name not in but and isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            if any(type(one) is int and not _LEAST_NUMBER <= one <= _MOST_NUMBER for one in inner):
                raise _too_large(name)


def _too_large(name: str) -> BadRequest:
    return BadRequest(f"{name} has a number beyond 64 bits; give a smaller one", param=name)

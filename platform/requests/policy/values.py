"""Values of a request's fields: kinds, numbers of entries, lengths of texts, sizes of numbers.

vLLM reads "+16", 16.0 and "1_6" as 16. Here whole numbers are JSON's, so that what is counted is
what is computed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.fields import BOOLEANS, INTEGERS

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


def check_values(path: str, fields: Mapping[str, Any], texts: Container[str] = ()) -> None:
    """Raises BadRequest for a number or switch written as something else, a number beyond 64 bits,
    and too many or too long entries; those of ``texts`` may be many."""
    if len(fields) > MOST_FIELDS:
        raise BadRequest(
            f"the request has {len(fields)} fields, of which it may have {MOST_FIELDS}"
        )
    for name, value in fields.items():
        _check_kind(path, name, value)
        if isinstance(value, int | float):
            # vLLM makes whole numbers of some fractions.
            _check_number(name, value)
        elif isinstance(value, dict | list) and name not in texts:
            _check_entries(name, value)
        for text in value if isinstance(value, list) and name in _CHARACTERS else (value,):
            if isinstance(text, str) and len(text) > (most := _CHARACTERS.get(name, len(text))):
                raise BadRequest(
                    f"{name} has a text of {len(text)} characters, of which {most} are allowed; "
                    "give a shorter one",
                    param=name,
                )


def _check_kind(path: str, name: str, value: Any) -> None:
    if value is None or path not in INTEGERS:
        return
    if name in INTEGERS[path] and type(value) is not int:
        raise BadRequest(
            f"{name} must be a whole number in JSON, such as 16: no quotes, no point", param=name
        )
    if name in BOOLEANS[path] and type(value) is not bool:
        raise BadRequest(f"{name} must be true or false, without quotes", param=name)


def _check_entries(name: str, value: dict[str, Any] | list[Any]) -> None:
    entries = value.values() if isinstance(value, dict) else value
    sizes = [(len(value), _MOST.get(name, MOST_ENTRIES))]
    sizes += [(len(one), MOST_ENTRIES) for one in entries if isinstance(one, dict | list)]
    for size, most in sizes:
        if size > most:
            raise BadRequest(
                f"{name} has {size} entries, of which {most} are allowed; give fewer", param=name
            )
    for one in entries:
        if type(one) is int:
            _check_number(name, one)


def _check_number(name: str, value: float) -> None:
    if value < _LEAST_NUMBER or value > _MOST_NUMBER:
        raise BadRequest(f"{name} has a number beyond 64 bits; give a smaller one", param=name)

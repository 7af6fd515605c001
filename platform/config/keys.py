"""API keys: entries of ``server.api_keys``, and of the file ``server.api_keys_file``."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field

from loomserve.platform.config.base import FieldError, ModelName, Name, Section

KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class ApiKey(Section):
    """A client's key, of which only the hash is kept (``loomserve key create`` prints both)."""

    name: Name = Field(description="Who uses the key; the label in metrics and logs.")
    hash: KeyHash = Field(description="What loomserve key create printed.")
    next_hash: KeyHash | None = Field(
        None,
        description="Hash of a second key that is as good: give it to its user, then make it the "
        "hash and leave this out (loomserve key rotate does both).",
    )
    expires_at: AwareDatetime | None = Field(
        None,
        description='From then on the key is refused, such as "2027-01-31T00:00:00Z", in quotes.',
    )
    models: tuple[ModelName, ...] = Field(
        (), description="The models and aliases this key may use; none named means all."
    )
    requests_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests over this rate, of any method, are answered 429."
    )
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="More than this at once are answered 429; of a request each prompt and each of "
        "its n answers counts.",
    )
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Once it has used more tokens, of prompts and answers, further requests are "
        "answered 429 until they are made up for at this rate.",
    )
    tokens_per_day: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Once it has used so many tokens, further requests are answered 429 until "
        "midnight UTC.",
    )
    first_priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = Field(
        0,
        description="The smallest priority that its requests may name; the smaller goes first, and "
        "without one a request has 0.",
    )
    refuse_late: bool = Field(
        False,
        description="Answer 429 at once where a request is predicted to miss its x-slo-ms; of "
        "models with lengths.",
    )

    @property
    def hashes(self) -> tuple[str, ...]:
        return (self.hash,) if self.next_hash is None else (self.hash, self.next_hash)


def _checked(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    """Raises FieldError if two keys have one name or hash."""
    names: set[str] = set()
    hashes: set[str] = set()
    for index, key in enumerate(keys):
        if key.name in names:
            raise FieldError("two API keys have the same name", (index, "name"))
        names.add(key.name)
        for field, value in (("hash", key.hash), ("next_hash", key.next_hash)):
            if value in hashes:
                raise FieldError("two API keys have the same hash", (index, field))
            if value is not None:
                hashes.add(value)
    return keys


ApiKeys = Annotated[tuple[ApiKey, ...], AfterValidator(_checked)]


class KeysFile(Section):
    """The file ``server.api_keys_file``."""

    api_keys: ApiKeys = Field((), description="As in server.api_keys.")

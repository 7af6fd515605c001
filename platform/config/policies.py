"""Policies by name: the platform's own, and those that installed packages bring.

There is a registry for each kind. A policy is a class with its options and what it keeps; it is
found by an entry point, so that nothing of the platform has to be changed for another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema

from loomserve.platform.config.base import FieldError


class PolicyOptions(BaseModel):
    """Options of a policy that takes none; those that it takes are the fields of a subclass."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicyRegistry:
    """Policies of one kind: subclasses of one class, whose ``Options`` are a pydantic model. As
    metadata of a ``str`` it is the type of a field that names one of them. Entry points are looked
    up once, when a name is asked for that is none of the platform's own: that takes some 16 ms.
    What is loaded is kept."""

    def __init__(self, kind: str, group: str, base: str, own: Mapping[str, str]) -> None:
        """``group``: of entry points; ``base`` and ``own``: classes as ``module:Class``."""
        self.own = own
        self._kind, self._group, self._base = kind, group, EntryPoint(kind, base, group)
        self._loaded: dict[str, Any] = {}

    @cached_property
    def _brought(self) -> Mapping[str, EntryPoint]:
        found = {each.name: each for each in entry_points(group=self._group)}
        return {name: each for name, each in found.items() if name not in self.own}

    @property
    def names(self) -> list[str]:
        """All of them, the platform's own first."""
        return [*self.own, *self._brought]

    def load(self, name: str) -> Any:
        """The class. Raises ValueError if there is none, or if it cannot be used."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def make(self, name: str, options: Mapping[str, Any], *rest: Any) -> Any:
        """A new policy with these options; ``rest``: what else its kind is made with."""
        policy = self.load(name)
        return policy(policy.Options.model_validate(options), *rest)

    def check(
        self, name: str, options: Mapping[str, Any], *within: str, but: Collection[str] = ()
    ) -> None:
        """See that a policy takes the options; the platform's own are not loaded for none. Raises
        FieldError, which points at the wrong one ``within`` a field, or, of those in ``but``, at
        the section's own field."""
        if not options and name in self.own:
            return
        try:
            self.load(name).Options.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            place, said = first["loc"], first["msg"].removeprefix("Value error, ")
            if not (place and place[0] in but):
                place = (*within, *place)
            raise FieldError(said, place) from None

    def _load(self, name: str) -> Any:
        if name in self.own:
            at = EntryPoint(name, self.own[name], self._group)
        elif name in self._brought:
            at = self._brought[name]
        else:
            *others, last = map(repr, self.names)
            raise ValueError(f"Input should be {', '.join(others)} or {last}")
        try:
            policy = at.load()
        except Exception as error:  # whatever the import of a user's package raises
            raise ValueError(f"{self._kind} {name!r} cannot be imported: {error}") from error
        if not (isinstance(policy, type) and issubclass(policy, self._base.load())):
            raise ValueError(
                f"{self._kind} {name!r} is no {self._kind}: {at.value} is to name a subclass of "
                f"{self._base.value.replace(':', '.')}"
            )
        return policy

    def _usable(self, name: str) -> str:
        if name not in self.own:
            self.load(name)
        return name

    # As a type of pydantic's

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._usable, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": self.names, "type": "string"}

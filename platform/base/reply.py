"""What an actor answers: a value, or the error that refuses it.

Ray wraps exceptions that a method raises, so errors travel as values.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

from loomserve.platform.base.errors import RequestError

P = ParamSpec("P")
T = TypeVar("T")

Ask = Callable[..., Awaitable[Any]]
"""Calls an actor's method, by its name.

Gives the reply's value; its error is raised, or is an HTTP response in the value's place.
"""


@dataclass(frozen=True)
class Reply(Generic[T]):
    """``value``, unless there is an ``error``."""

    value: T | None = None
    error: RequestError | None = None

    def get(self) -> T:
        """The value; ``RequestError`` if the actor refused."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


def replies(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[Reply[T]]]:
    """Decorate an actor's method: what it returns, or its ``RequestError``, is its reply."""

    @functools.wraps(method)
    async def replied(*args: P.args, **kwargs: P.kwargs) -> Reply[T]:
        try:
            return Reply(value=await method(*args, **kwargs))
        except RequestError as error:
            return Reply(error=error)

    return replied

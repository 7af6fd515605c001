"""Replies of actors, which are pickled on their way."""

from __future__ import annotations

import inspect
import pickle

import pytest

from loomserve.platform.base.errors import Conflict, MethodNotAllowed, RequestError, Unavailable
from loomserve.platform.base.reply import Reply, replies

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Actor:
    @replies
    async def half(self, number: int) -> int:
        """Of an even number."""
        if number % 2:
            raise Conflict(f"{number} is odd", param="number")
        return number // 2

    @replies
    async def broken(self) -> None:
        raise KeyError("a defect")


async def test_a_value_or_an_error_is_the_reply() -> None:
    assert (await Actor().half(4)).get() == 2
    with pytest.raises(Conflict, match="3 is odd"):
        (await Actor().half(3)).get()


async def test_a_defect_is_no_reply() -> None:
    with pytest.raises(KeyError):
        await Actor().broken()


def test_a_method_stays_a_coroutine_function_with_its_name_and_text() -> None:
    assert inspect.iscoroutinefunction(Actor.half)
    assert (Actor.half.__name__, Actor.half.__doc__) == ("half", "Of an even number.")


@pytest.mark.parametrize(
    "error",
    [
        Conflict("it is there already", param="name", reason="taken"),
        Unavailable("it restarts", retry_after_s=5),
        MethodNotAllowed("not so", allow="GET"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_whole(error: RequestError) -> None:
    arrived = pickle.loads(pickle.dumps(Reply[None](error=error))).error
    assert type(arrived) is type(error)
    assert (arrived.body(), arrived.status, arrived.headers()) == (
        error.body(), error.status, error.headers(),
    )  # fmt: skip

"""Repeated work, on a loop whose sleeps are only noted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from loomserve.platform.base.periodic import every

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Work:
    """Fails as it is told, and stops the loop after its last run."""

    def __init__(self, *ends: Exception | None) -> None:
        self._ends = [*ends]
        self.runs = 0

    async def __call__(self) -> None:
        self.runs += 1
        if not self._ends:
            raise asyncio.CancelledError
        if (error := self._ends.pop(0)) is not None:
            raise error


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return pauses


async def test_work_is_repeated_after_a_period(slept: list[float]) -> None:
    work = Work(None, None)
    with pytest.raises(asyncio.CancelledError):
        await every(2.0, work, delay_s=5.0)
    assert work.runs == 3
    assert slept == [5.0, 2.0, 2.0]


async def test_the_first_error_ends_work_that_nobody_wants_repeated(slept: list[float]) -> None:
    work = Work(None, ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await every(2.0, work)
    assert slept == [0.0, 2.0]


@pytest.mark.parametrize(("retry_s", "pause_s"), [(None, 2.0), (0.5, 0.5)])
async def test_work_that_failed_is_repeated_and_its_errors_are_told(
    slept: list[float], retry_s: float | None, pause_s: float
) -> None:
    told: list[Exception] = []
    errors = [ValueError("a"), OSError("b")]
    with pytest.raises(asyncio.CancelledError):
        await every(2.0, Work(errors[0], None, errors[1]), failed=told.append, retry_s=retry_s)
    assert told == errors
    assert slept == [0.0, pause_s, 2.0, pause_s]


async def test_errors_of_another_kind_end_the_work(slept: list[float]) -> None:
    told: list[Exception] = []
    with pytest.raises(ValueError, match="not awaited"):
        await every(
            2.0, Work(OSError(), ValueError("not awaited")), failed=told.append, errors=OSError
        )
    assert [type(error) for error in told] == [OSError]


async def test_a_failing_report_of_an_error_ends_the_work(slept: list[float]) -> None:
    def fails(_: Exception) -> None:
        raise RuntimeError("cannot log")

    with pytest.raises(RuntimeError, match="cannot log"):
        await every(2.0, Work(ValueError()), failed=fails)


async def cancelled(work: Callable[[], asyncio.Future[None]]) -> bool:
    task = asyncio.ensure_future(every(60.0, work, failed=lambda _: None))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return task.cancelled()


async def test_cancelling_ends_it_while_it_sleeps_and_while_it_works() -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    hangs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert await cancelled(lambda: done)
    assert await cancelled(lambda: hangs)
    assert hangs.cancelled()

"""Calls that open and end loans: each concerns an engine's scheduler and its worker, in one order.

They come as ``collective_rpc`` of names that begin with ``PREFIX``, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from vllm.config import VllmConfig

PREFIX = "loans."

Workers = Callable[..., list[Any]]
"""``collective_rpc`` of the engine's workers: method, timeout, args."""

_schedulers: WeakSet[Any] = WeakSet()


def serve(scheduler: Any) -> None:
    """Let this scheduler answer the calls to its engine, whose EngineCore this process is."""
    _schedulers.add(scheduler)


def answer(
    config: VllmConfig,
    method: str,
    workers: Workers,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """What the scheduler's method of this name returns; it may call its workers.

    Raises:
        RuntimeError: the engine takes part in no lending.
    """
    scheduler = next((each for each in _schedulers if each.vllm_config is config), None)
    if scheduler is None:
        raise RuntimeError("this engine neither lends nor borrows: give its model `lending`")

    def of_workers(name: str, *given: Any) -> Any:
        return workers(name, timeout, given)[0]

    return getattr(scheduler, method.removeprefix(PREFIX))(of_workers, *args, **(kwargs or {}))

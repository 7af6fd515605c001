"""Calls from outside an engine to its scheduler, which may call the engine's workers.

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
WorkerCall = Callable[..., Any]
"""Calls a method of the engine's first worker: its name, and what it is given."""


class SchedulerCalls:
    """Answers the calls of one protocol for the engine with this configuration.

    The methods of ``protocol`` are the calls. ``answerer`` makes an implementation of it that calls
    the workers which it is given.
    """

    def __init__(
        self, config: VllmConfig, protocol: type, answerer: Callable[[WorkerCall], object]
    ) -> None:
        self.config = config
        self._names = frozenset(name for name in vars(protocol) if not name.startswith("_"))
        self._answerer = answerer
        _served.add(self)

    def answer(self, name: str, workers: WorkerCall, *args: Any, **kwargs: Any) -> Any:
        if name not in self._names:
            known = ", ".join(sorted(self._names))
            raise ValueError(f"there is no call {name!r}; there are: {known}")
        return getattr(self._answerer(workers), name)(*args, **kwargs)


# An engine's scheduler holds its own; here they are found by the executor.
_served: WeakSet[SchedulerCalls] = WeakSet()


def answer(
    config: VllmConfig,
    method: str,
    workers: Workers,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Answer the call of this name. Raises RuntimeError if the engine takes part in no lending;
    ValueError if there is no such call, or it is refused."""
    calls = next((each for each in _served if each.config is config), None)
    if calls is None:
        raise RuntimeError("this engine neither lends nor borrows: give its model `lending`")

    def of_first(name: str, *given: Any) -> Any:
        return workers(name, timeout, given)[0]

    return calls.answer(method.removeprefix(PREFIX), of_first, *args, **(kwargs or {}))

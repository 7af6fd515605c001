"""Ray Serve's part that the platform uses, in one process: deployments are objects of one loop.

So the whole platform runs as it is written, without Ray, and only Ray's interface is made up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from loomserve.deployments.engine.hosted_engine import HostedEngine
from loomserve.platform.fleet.messages import EngineOrder
from tests.waiting import PATIENCE_S

_made = HostedEngine.__init__


class Bound(NamedTuple):
    """An application, which is to be started."""

    made_by: Callable[..., Any]
    given: tuple[Any, ...]


class Answer:
    """What a call of a deployment gives: a coroutine waits for it, or a thread."""

    def __init__(self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._future: Future[Any] = asyncio.run_coroutine_threadsafe(work, loop)

    def __await__(self) -> Generator[Any, Any, Any]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout_s: float | None = None) -> Any:
        return self._future.result(timeout_s)

    def cancel(self) -> None:
        self._future.cancel()


class Handle:
    """Calls the methods of an application's deployment."""

    def __init__(self, serve: OneProcessServe, app: str) -> None:
        self._serve, self._app = serve, app

    def __getattr__(self, method: str) -> Any:
        async def call(*given: Any) -> Any:
            return await getattr(self._serve.running[self._app], method)(*given)

        return SimpleNamespace(remote=lambda *given: Answer(call(*given), self._serve.loop))


class OneProcessServe:
    """Takes Ray's place in this process while it is entered."""

    def __init__(self, folder: Path, starts: Callable[[str], bool]) -> None:
        """``starts``: whether an application of this name is started, or only seems to be."""
        self.loop = asyncio.new_event_loop()
        self.running: dict[str, Any] = {}
        self._apps: dict[str, ApplicationStatus] = {}
        self._folder, self._starts = folder, starts
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> OneProcessServe:
        context = SimpleNamespace(
            get_temp_dir=lambda: str(self._folder), get_session_name=lambda: "session"
        )
        for where, name, stands_in in (
            (ray, "get_runtime_context", lambda: context),
            (ray.util, "get_node_ip_address", lambda: "127.0.0.1"),
            (serve, "deployment", self._deployment),
            (serve, "run_many", self._run_many),
            (serve, "delete", self._delete),
            (serve, "status", lambda: SimpleNamespace(applications=self._statuses())),
            (serve, "get_deployment_handle", lambda _, app: Handle(self, app)),
            # Whose names are made up at random.
            (HostedEngine, "__init__", _with_a_name),
        ):
            self._patches.setattr(where, name, stands_in)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Those that call others end first.
        for app in reversed(list(self.running)):
            self._delete(app)
        self.do(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self._patches.undo()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Have the loop do it, and wait."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def _deployment(self, made_by: Callable[..., Any], **_: Any) -> Any:
        return SimpleNamespace(bind=lambda *given: Bound(made_by, given))

    def _run_many(self, targets: Sequence[Any], **_: Any) -> None:
        for each in targets:
            self._apps[each.name] = ApplicationStatus.DEPLOYING
            work = self._start(each.name, each.target)
            asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _start(self, name: str, app: Bound) -> None:
        if self._starts(name):
            made = app.made_by.__new__(app.made_by)  # type: ignore[call-overload]
            try:
                await made.__init__(*app.given)
            except BaseException:
                self._apps[name] = ApplicationStatus.DEPLOY_FAILED
                raise
            self.running[name] = made
        self._apps[name] = ApplicationStatus.RUNNING

    def _delete(self, name: str, **_: Any) -> None:
        self._apps.pop(name, None)
        made = self.running.pop(name, None)
        if made is not None and hasattr(made, "__del__"):
            self.do(made.__del__())
            # Python would call it once more.
            made.__class__ = type("Ended", (type(made),), {"__del__": lambda _: None})

    def _statuses(self) -> dict[str, Any]:
        return {
            name: SimpleNamespace(status=status, deployments={}, message="it did not start")
            for name, status in self._apps.items()
        }

    async def _end(self) -> None:
        own = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not own]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _with_a_name(engine: HostedEngine, order: EngineOrder, *given: Any) -> None:
    _made(engine, order, *given)
    engine.id = f"{order.spec.model.name}-{order.device}"

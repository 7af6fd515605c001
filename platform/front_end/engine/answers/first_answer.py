"""A new replica's first request, which is the platform's own and comes before clients' requests.

It takes their path (template, sampling defaults, tokenizer, engine), so a fault that would fail
every request is found once per engine start.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from loomserve.platform.base.errors import Unavailable
from loomserve.platform.base.plain_reason import plain_reason
from loomserve.platform.fleet.messages import ModelRoute, ReplicaRoute
from loomserve.platform.front_end.routing import RoutingContext, routing_context
from loomserve.platform.http.asgi import CollectedAnswer, never_gone, own_post
from loomserve.platform.http.engine_errors import model_failed
from loomserve.platform.http.ingress.body import replay
from loomserve.platform.state import ModelStatus

_log = logging.getLogger(__name__)

_AGAIN_S = 0.25
_TEXT = "Hi"
# In vLLM's words: the model has no chats, or no room for its own template.
_NO_CHAT = ("default chat template is no longer", "maximum context length", "maximum model length")

Question = tuple[str, dict[str, Any]]
"""An endpoint of vLLM's, and a request to it without its model."""

Tell = Callable[[str, str], Awaitable[None]]
"""Tells a replica, by its address, why it does not answer; empty: it does."""


class _Serving(Protocol):
    tasks: tuple[str, ...]

    @property
    def replicas(self) -> Collection[str]: ...
    async def server(self) -> Any: ...


class FirstAnswers:
    """Has each replica of a model answer once; all of it runs on one event loop."""

    def __init__(
        self, model: str, serving: _Serving, context_of: Callable[[str], RoutingContext], tell: Tell
    ) -> None:
        """``context_of``: of a request to one replica; ``tell`` is called once a replica."""
        self._model, self._serving = model, serving
        self._context_of, self._tell = context_of, tell
        self._answering: frozenset[str] = frozenset()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}
        self._ever = False
        self._decided = asyncio.Event()
        self.untried: frozenset[str] = frozenset()
        """Replicas that have not answered, and are to get no other request."""

    def apply(self, route: ModelRoute) -> None:
        """Take over which replicas there are; those that no gateway has asked yet are asked."""
        there = {each.id: each for each in route.replicas}
        for gone in self._tasks.keys() - there.keys():
            self._tasks.pop(gone).cancel()
        self._problems = {id_: why for id_, why in self._problems.items() if id_ in there}
        told = {each.id for each in route.replicas if each.answers}
        self._answering = frozenset(told | (self._answering & there.keys()))
        # A request would wake one that sleeps.
        if route.status is not ModelStatus.ASLEEP:
            for id_ in there.keys() - self._answering - self._tasks.keys():
                self._tasks[id_] = asyncio.create_task(self._try(there[id_]))
        self._note(there.keys())

    def _note(self, there: Collection[str]) -> None:
        self.untried = frozenset(there) - self._answering
        self._ever |= bool(self._answering)
        if self._answering or (there and self._problems.keys() >= set(there)):
            self._decided.set()
        else:
            self._decided.clear()

    @property
    def some(self) -> bool:
        """Whether a replica has answered; one in the place of those that have ended may have to."""
        return bool(self._answering) or (self._ever and not self._problems)

    async def until_some(self, timeout_s: float) -> None:
        """Wait for the first replica that answers; raises Unavailable if none does in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._decided.wait()
        except TimeoutError:
            raise Unavailable(
                f"model {self._model!r} has not given its first answer yet; try again shortly",
                reason="model_not_ready",
                retry_after_s=5,
            ) from None
        if not self.some:
            raise model_failed(self._model)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _try(self, replica: ReplicaRoute) -> None:
        problem = await self._problem_of(replica.id)
        if problem:
            _log.error("model %s, replica %s: %s", self._model, replica.id, problem)
            self._problems[replica.id] = problem
        else:
            self._answering |= {replica.id}
        self._note(self.untried | self._answering)
        while True:
            try:
                await self._tell(replica.address, problem)
                return
            except Exception as error:  # retried until the replica has heard it, or is gone
                _log.warning("replica %s was not told: %r", replica.id, error)
                await asyncio.sleep(_AGAIN_S)

    async def _problem_of(self, replica_id: str) -> str:
        while True:
            try:
                app = await self._serving.server()
                if replica_id in self._serving.replicas:
                    questions = questions_to(self._serving.tasks)
                    return await first_problem(
                        app, self._model, questions, lambda: self._context_of(replica_id)
                    )
            except Unavailable:  # it is drained, or connects anew
                pass
            except Exception as error:
                _log.warning("replica %s was not asked: %r", replica_id, error)
            await asyncio.sleep(_AGAIN_S)


def questions_to(tasks: Sequence[str]) -> tuple[Question, ...]:
    """Requests to try on a model with these vLLM tasks until one is answered, if any."""
    if "generate" in tasks:
        chat = {"messages": [{"role": "user", "content": _TEXT}], "max_tokens": 1}
        return (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": _TEXT, "max_tokens": 1}),
        )
    if "embed" in tasks:
        return (("/v1/embeddings", {"input": _TEXT}),)
    if "classify" in tasks:
        # Some judge one text, and rerankers two.
        pair = {"text_1": _TEXT, "text_2": _TEXT}
        return (("/score", pair), ("/classify", {"input": _TEXT}))
    pooling = next((task for task in tasks if task.startswith("token_")), None)
    return () if pooling is None else (("/pooling", {"input": _TEXT, "task": pooling}),)


async def first_problem(
    app: Any, model: str, questions: Sequence[Question], context: Callable[[], RoutingContext]
) -> str:
    """Ask until one question is answered; why none is, or ``""``. A later question is asked if the
    model lacks the endpoint of the one before. Raises RequestError if there is no answer, and it is
    not known why."""
    problem = ""
    for path, fields in questions:
        asked = context()
        routing_context.set(asked)
        status, body = await _asked(app, path, {"model": model, **fields})
        if asked.failure is not None:
            raise asked.failure
        if status < 400:
            return ""
        words = _words(body)
        problem = f"its first request ({path}) was answered {status}: {plain_reason(words)}"
        other_endpoint = status == 404 or any(each in words for each in _NO_CHAT)
        if not other_endpoint and path != "/score":
            return problem
    return problem


def _words(body: bytes) -> str:
    try:
        error = json.loads(body)
        return str((error.get("error") or error)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return body.decode("utf-8", "replace")


async def _asked(app: Any, path: str, fields: dict[str, Any]) -> tuple[int, bytes]:
    body, answer = json.dumps(fields).encode(), CollectedAnswer()
    scope = own_post(path, b"application/json")
    try:
        await app(scope, replay(body, never_gone), answer.send)
    except Exception as error:
        # vLLM's server answers first, and then raises for its own log.
        if not answer.body:
            return answer.status or 500, f"{type(error).__name__}: {error}".encode()
    return answer.status or 500, bytes(answer.body)

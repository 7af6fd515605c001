"""A replica's first answer: what it is asked, what counts as one, and who waits for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.base.errors import EngineGone, Unavailable
from loomserve.platform.fleet.messages import ModelRoute, ReplicaRoute
from loomserve.platform.front_end.engine.answers.first_answer import (
    FirstAnswers,
    first_problem,
    questions_to,
)
from loomserve.platform.front_end.routing import RoutingContext, routing_context
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state import ModelStatus
from tests.unit.platform.fleet.heartbeats import served_model
from tests.waiting import PATIENCE_S

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a "
    "chat template if the tokenizer does not define one."
)

Answers = Mapping[str, tuple[int, str]]
"""By endpoint: a status, and the message of an error."""


class Server:
    """vLLM's app, as an ASGI application."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.asked = answers, list[tuple[str, dict[str, Any]]]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        body = json.loads((await receive())["body"])
        self.asked.append((path, body))
        status, message = self.answers.get(path, (404, "Not Found"))
        if status == 0:
            raise TypeError(message)
        told = {"error": {"message": message}} if status >= 400 else {"choices": []}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})


def problem_of(tasks: tuple[str, ...], answers: Answers) -> tuple[str, list[str]]:
    server = Server(answers)
    work = first_problem(server, "m", questions_to(tasks), RoutingContext)
    return asyncio.run(work), [path for path, _ in server.asked]


@pytest.mark.parametrize(
    ("tasks", "answers", "asked"),
    [
        (("generate",), {CHAT: (200, "")}, [CHAT]),
        (("generate",), {CHAT: (400, NO_TEMPLATE), TEXT: (200, "")}, [CHAT, TEXT]),
        (("generate",), {CHAT: (400, "maximum context length"), TEXT: (200, "")}, [CHAT, TEXT]),
        (("generate",), {TEXT: (200, "")}, [CHAT, TEXT]),
        (("embed", "token_embed"), {"/v1/embeddings": (200, "")}, ["/v1/embeddings"]),
        (("classify",), {"/score": (200, "")}, ["/score"]),
        (("classify",), {"/score": (400, "no"), "/classify": (200, "")}, ["/score", "/classify"]),
        (("token_classify",), {"/pooling": (200, "")}, ["/pooling"]),
        (("transcription",), {}, []),
    ],
)  # fmt: skip
def test_a_model_answers_what_its_task_is(
    tasks: tuple[str, ...], answers: Answers, asked: list[str]
) -> None:
    assert problem_of(tasks, answers) == ("", asked)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (
            {CHAT: (400, "'<' not supported")},
            f"its first request ({CHAT}) was answered 400: '<' not",
        ),
        ({CHAT: (500, "vllm.a.b.OddError: broken")}, "was answered 500: broken"),
        ({CHAT: (0, "unhashable")}, "was answered 500: unhashable"),
        ({CHAT: (400, NO_TEMPLATE), TEXT: (400, "odd")}, f"({TEXT}) was answered 400: odd"),
    ],
)
def test_one_that_refuses_it_says_why(answers: Answers, told: str) -> None:
    problem, _ = problem_of(("generate",), answers)
    assert told in problem


def test_an_engine_that_ends_with_it_says_nothing_of_the_model() -> None:
    class Ending(Server):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            context = routing_context.get()
            assert context is not None
            context.failure = EngineGone("it ended")
            await super().__call__(scope, receive, send)

    with pytest.raises(EngineGone):
        asyncio.run(
            first_problem(
                Ending({CHAT: (500, "")}), "m", questions_to(["generate"]), RoutingContext
            )
        )


class Serving:
    """A model's front end, to which replicas are connected or not."""

    tasks = ("generate",)

    def __init__(self, answers: Answers) -> None:
        self.app = Server(answers)
        self.replicas: dict[str, Any] = {}

    async def server(self) -> Server:
        return self.app


class Scene:
    def __init__(self, answers: Answers) -> None:
        self.serving = Serving(answers)
        self.told: list[tuple[str, str]] = []
        self.pinned: list[str] = []
        self.first = FirstAnswers("m", self.serving, self._context, self._tell)  # type: ignore[arg-type]

    def _context(self, replica_id: str) -> RoutingContext:
        self.pinned.append(replica_id)
        return RoutingContext()

    async def _tell(self, address: str, problem: str) -> None:
        self.told.append((address, problem))

    def apply(self, status: ModelStatus = ModelStatus.LOADING, **answers: bool) -> None:
        replicas = tuple(
            ReplicaRoute(
                id=id_, device="core0", address=f"at-{id_}", answers=has,
                engine=EngineAddress.in_folder(Path("/run")),
            )
            for id_, has in answers.items()
        )  # fmt: skip
        self.first.apply(
            ModelRoute(
                model=served_model(),
                status=status, max_model_len=None, replicas=replicas,
            )
        )  # fmt: skip


def run(answers: Answers, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(answers)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(scene)
        finally:
            scene.first.close()

    asyncio.run(main())


def test_each_replica_is_asked_once_as_soon_as_it_is_connected() -> None:
    async def scenario(scene: Scene) -> None:
        scene.apply(a=False, b=True)
        assert (scene.first.some, scene.first.untried) == (True, {"a"})
        await asyncio.sleep(0)
        assert scene.serving.app.asked == []
        scene.serving.replicas["a"] = object()
        while not scene.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (scene.told, scene.pinned) == ([("at-a", "")], ["a"])
        scene.apply(a=False, b=True)
        scene.apply(a=True, b=True)
        await asyncio.sleep(0.01)
        assert scene.first.untried == frozenset()
        assert len(scene.serving.app.asked) == 1

    run({CHAT: (200, "")}, scenario)


def test_clients_wait_for_the_first_answer_and_hear_at_once_where_there_is_none() -> None:
    async def scenario(scene: Scene) -> None:
        scene.apply(a=False)
        waiting = asyncio.create_task(scene.first.until_some(PATIENCE_S))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        scene.serving.replicas["a"] = object()
        with pytest.raises(Unavailable, match="ask the operator") as raised:
            await waiting
        assert raised.value.headers() == {}
        assert scene.told == [("at-a", f"its first request ({CHAT}) was answered 400: odd")]
        # The operator has it loaded anew, mended.
        scene.serving.app.answers = {CHAT: (200, "")}
        scene.serving.replicas["b"] = object()
        scene.apply(b=False)
        await scene.first.until_some(PATIENCE_S)

    run({CHAT: (400, "odd")}, scenario)


def test_one_that_sleeps_is_asked_when_it_has_woken() -> None:
    async def scenario(scene: Scene) -> None:
        scene.serving.replicas["a"] = object()
        scene.apply(ModelStatus.ASLEEP, a=False)
        await asyncio.sleep(0.01)
        assert scene.serving.app.asked == []
        scene.apply(ModelStatus.LOADING, a=False)
        await scene.first.until_some(PATIENCE_S)

    run({CHAT: (200, "")}, scenario)


def test_requests_go_on_to_one_in_the_place_of_another_unless_it_does_not_answer() -> None:
    async def scenario(scene: Scene) -> None:
        scene.apply(a=True)
        scene.apply(b=False)
        # It waits where those wait that have begun, for a replica that is not chosen yet.
        assert (scene.first.some, scene.first.untried) == (True, {"b"})
        scene.serving.replicas["b"] = object()
        while not scene.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not scene.first.some
        with pytest.raises(Unavailable, match="ask the operator"):
            await scene.first.until_some(PATIENCE_S)

    run({CHAT: (400, "odd")}, scenario)

"""The spans of a request, one a replica that had it, and where vLLM's own span finds its place."""

from __future__ import annotations

from vllm.v1.engine import FinishReason

from loomserve.platform.front_end.routing import RoutingContext, routing_context
from loomserve.platform.state.roles import Role
from loomserve.platform.tracing import RequestTrace
from tests.unit.platform.front_end.engine.scene import Scene, played, request, until
from tests.unit.platform.tracing.spans import Spans, attributes, events, id_of, parent_of

HEADERS = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


async def ask(made: Scene, trace: RequestTrace | None, tokens: int, on: str) -> None:
    asked = request("r", tokens)
    asked.trace_headers = HEADERS
    token = routing_context.set(RoutingContext(trace=trace))
    try:
        await made.client.add_request_async(asked)
    finally:
        routing_context.reset(token)
    await until(lambda: "r" in made.engines[on].work)


def test_a_request_that_one_replica_answers_is_one_span() -> None:
    async def play(made: Scene) -> None:
        spans = Spans()
        trace = spans.begin()
        await made.have("a")
        await ask(made, trace, 3, "a")
        (sent,) = made.engines["a"].added
        assert sent.trace_headers is None, "the engine would send it back with each token"
        await made.engines["a"].step(3)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        trace.end(200)
        answer, server = spans.all
        assert answer.name == "answer"
        assert parent_of(answer) == id_of(server)
        assert attributes(answer) == {
            "loomserve.sequence": "r",
            "loomserve.replica": "a",
            "loomserve.attempt": 0,
            "loomserve.left": "finished",
            "loomserve.tokens": 3,
        }
        assert events(server) == {}
        assert attributes(server)["gen_ai.usage.input_tokens"] == 3
        assert attributes(server)["gen_ai.usage.output_tokens"] == 3

    played(play)


def test_a_request_that_goes_on_has_a_span_at_each_replica() -> None:
    async def play(made: Scene) -> None:
        spans = Spans()
        trace = spans.begin()
        await made.have("a", "b")
        await ask(made, trace, 4, "a")
        await made.engines["a"].step(2)
        await until(lambda: made.got == {"r": [0, 1]})
        made.engines["a"].end()
        await until(lambda: "r#1" in made.engines["b"].work)
        await made.engines["b"].step(2)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        trace.end(200)
        first, second, server = spans.all
        assert [first.name, second.name] == ["answer", "answer"]
        assert attributes(first)["loomserve.left"] == "gone"
        assert attributes(first)["loomserve.tokens"] == 2
        assert attributes(second) == {
            "loomserve.sequence": "r",
            "loomserve.replica": "b",
            "loomserve.attempt": 1,
            "loomserve.from": "a",
            "loomserve.why": "gone",
            "loomserve.left": "finished",
            "loomserve.tokens": 4,
        }
        (told,) = events(server).items()
        assert told[0] == "continuation"
        assert (told[1]["loomserve.from"], told[1]["loomserve.to"]) == ("a", "b")

    played(play)


def test_a_prompt_that_is_handed_over_is_a_span_and_its_answer_another() -> None:
    async def play(made: Scene) -> None:
        spans = Spans()
        trace = spans.begin()
        made.first = "d"
        made.roles = {"p": Role.PREFILL, "d": Role.DECODE}
        await made.have("p", "d")
        await ask(made, trace, 3, "p")
        await made.engines["p"].step()
        await until(lambda: "r#1" in made.engines["d"].work)
        await made.engines["d"].step(2)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        trace.end(200)
        assert spans.names == ["prefill", "decode", "POST /v1/completions"]
        prefill, decode, server = spans.all
        assert attributes(prefill)["loomserve.replica"] == "p"
        assert attributes(prefill)["loomserve.left"] == "handed_over"
        assert attributes(decode)["loomserve.from"] == "p"
        assert events(server)["hand_off"]["loomserve.to"] == "d"

    played(play)


def test_a_request_that_is_aborted_leaves_no_span_open() -> None:
    async def play(made: Scene) -> None:
        spans = Spans()
        trace = spans.begin()
        await made.have("a")
        await ask(made, trace, 30, "a")
        await made.engines["a"].step(2)
        await until(lambda: made.got == {"r": [0, 1]})
        await made.client.abort_requests_async(["r"])
        answer = spans.one("answer")
        assert attributes(answer)["loomserve.left"] == "aborted"
        assert attributes(answer)["loomserve.tokens"] == 2

    played(play)


def test_each_output_has_the_headers_that_the_request_came_with() -> None:
    async def play(made: Scene) -> None:
        seen: list[object] = []
        take = made.client.requests.take

        def noted(replica, output, now):  # type: ignore[no-untyped-def]
            taken = take(replica, output, now)
            seen.append(output.trace_headers)
            return taken

        made.client.requests.take = noted  # type: ignore[method-assign]
        await made.have("a")
        await ask(made, None, 3, "a")
        await made.engines["a"].step(3)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        # A stop string ends an answer with an output of which the engine does not know that.
        assert seen == [HEADERS] * 3

    played(play)

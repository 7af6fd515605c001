"""Requests of a front end go on when an engine ends, stops, hangs, forgets or is taken away."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from loomserve.platform.base.errors import EngineGone, TooManyRequests, Unavailable
from loomserve.platform.engine.resumption.travelling import RESUMED
from loomserve.platform.front_end.engine.request_book import LostRequestError
from loomserve.platform.front_end.routing import RoutingContext, routing_context
from tests.unit.platform.front_end.engine.peer import PeerEngine
from tests.unit.platform.front_end.engine.scene import BOUNDS, Scene, played, request, until


def test_a_request_is_answered_and_its_replica_is_told_when_it_has_left() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        context = RoutingContext()
        token = routing_context.set(context)
        await made.ask(request("r", 3))
        routing_context.reset(token)
        await made.engines["a"].step(3)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        assert made.got == {"r": [0, 1, 2]}
        (asked,) = made.asked
        assert (asked.prompt_token_ids, asked.max_tokens) == ([1, 2, 3], 3)
        assert asked.candidates == {"a", "b"}
        assert asked.context is context
        assert made.left == [(asked, "a")]
        assert not made.client.requests.open

    played(play)


def test_loads_come_with_outputs_after_these_were_taken() -> None:
    async def play(scene: Scene) -> None:
        await scene.have("a")
        engine = scene.engines["a"]
        engine.tells_load = True
        began = time.monotonic()
        await scene.ask(request("one", tokens=2), request("two"))
        await engine.step()
        await until(lambda: len(scene.loads) == 1)
        (name, load, counted_until) = scene.loads[0]
        assert (name, load.counted, load.running, load.waiting) == ("a", 2, 2, 5)
        assert began < counted_until <= time.monotonic()
        assert scene.client.replicas["a"].load == (2, 5)
        await engine.step()
        await until(lambda: len(scene.loads) == 2)
        # Whoever hears of a load has been told who is not in it any more.
        assert [each.request_id for each, _ in scene.left] == ["one"]
        await until(lambda: scene.got["two"] == [0, 1])

    played(play)


@pytest.mark.parametrize("how", ["killed", "says that it ends"])
def test_a_request_goes_on_with_its_tokens_when_its_engine_ends(how: str) -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r", 6), request("s", 6, logit_bias={5: 1.0}, prompt_logprobs=1))
        await made.engines["a"].step(2)
        await until(lambda: made.got == {"r": [0, 1], "s": [0, 1]})
        if how == "killed":
            made.engines["a"].end()
        else:
            await made.engines["a"].say_dead()
        b = made.engines["b"]
        await until(lambda: set(b.work) == {"r#1", "s#1"})
        resumed = b.work["s#1"].request
        assert resumed.sampling_params.extra_args == {RESUMED: [0, 1]}
        assert resumed.sampling_params.prompt_logprobs is None
        assert made.asked[-1].prompt_token_ids == [1, 2, 3, 0, 1]
        assert made.asked[-1].max_tokens == 4
        assert made.asked[-1].exclude == {"a"}
        await b.step(4)
        await until(lambda: len(made.finished) == 2)
        assert made.got == {"r": [0, 1, 2, 3, 4, 5], "s": [0, 1, 2, 3, 4, 5]}
        assert made.count("continued_requests_total", reason="gone") == 2
        assert made.count("continuation_pause_seconds_count") == 2
        assert [replica for _, replica in made.left] == ["a", "a", "b", "b"]

    played(play)


def test_a_request_without_a_token_is_sent_as_it_was() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        pooling = EngineCoreRequest("p", [1], None, None, PoolingParams(), 0.0, None, None, None)
        await made.ask(request("r", 2, prompt_logprobs=1), pooling)
        made.engines["a"].end()
        b = made.engines["b"]
        await until(lambda: set(b.work) == {"r#1", "p#1"})
        params = b.work["r#1"].request.sampling_params
        assert (params.extra_args, params.prompt_logprobs) == (None, 1)
        await b.step(finish=FinishReason.STOP)
        await until(lambda: set(made.finished) == {"r", "p"})
        assert made.count("continuation_pause_seconds_count") == 0

    played(play)


def test_an_answer_that_was_complete_ends_although_its_engine_could_not_say_so() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r", 3), request("s", 9, stop_token_ids=[1]))
        a = made.engines["a"]
        for each in a.work.values():
            each.request.sampling_params.max_tokens = 9
        await a.step(3)
        await until(lambda: made.got == {"r": [0, 1, 2], "s": [0, 1, 2]})
        made.client.requests.open["s"].tokens.pop()
        a.end()
        await until(lambda: len(made.finished) == 2)
        assert made.finished == {"r": FinishReason.LENGTH, "s": FinishReason.STOP}
        assert not made.engines["b"].added

    played(play)


def test_a_drained_replica_loses_its_requests_only_after_another_has_them() -> None:
    async def play(made: Scene) -> None:
        await made.have("a")
        await made.ask(request("r", 8))
        a = made.engines["a"]
        await a.step(2)
        assert await made.client.drain("a", 0.3) == 1, "there is no other, so it goes on there"
        await a.step()
        await until(lambda: made.got == {"r": [0, 1, 2]})
        await made.have("a", "b")
        assert await made.client.drain("a", 5) == 0
        await until(lambda: a.aborted == ["r"])
        b = made.engines["b"]
        await until(lambda: "r#1" in b.work)
        await b.step(5)
        await until(lambda: "r" in made.finished)
        assert made.got == {"r": list(range(8))}
        assert made.count("continued_requests_total", reason="drained") == 1

    played(play)


def test_a_replica_that_is_not_drained_any_more_gets_requests_again() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        replica = made.client.replicas["a"]
        assert await made.client.drain("a", 1) == 0
        await made.ask(request("r", 8), on="b")
        made.client.undrain("a")
        assert await made.client.drain("b", 5) == 0
        await until(lambda: "r#1" in made.engines["a"].work)
        assert made.client.replicas["a"] is replica

    played(play)


def test_outputs_of_an_engine_that_a_request_has_left_are_dropped() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r", 4))
        a, b = made.engines["a"], made.engines["b"]
        a.silent = True
        await until(lambda: "r#1" in b.work)
        a.work["r"] = replace(b.work["r#1"], tokens=[7, 7, 7, 7])
        a.silent = False
        await a.step(2)
        await b.step(4)
        await until(lambda: "r" in made.finished)
        assert made.got == {"r": [0, 1, 2, 3]}
        assert made.count("continued_requests_total", reason="silent") == 1

    played(play)


def test_an_engine_whose_process_is_stopped_is_left_before_it_counts_as_silent() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r"))
        began = time.monotonic()
        made.client.replicas["a"].stopped()
        await until(lambda: "r#1" in made.engines["b"].work)
        assert time.monotonic() - began < BOUNDS.silence_s / 2
        assert made.count("continued_requests_total", reason="silent") == 1
        # A beat tells that it goes on.
        await asyncio.sleep(1.2)
        await made.ask(request("s"), on="a")

    played(play)


def test_a_stopped_engine_is_left_and_told_when_it_comes_back() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r"))
        a = made.engines["a"]
        a.silent = True
        await until(lambda: "r#1" in made.engines["b"].work)
        await until(lambda: a.aborted == ["r"])
        await made.ask(request("s"), on="b")
        assert "a" not in made.asked[-1].candidates
        a.silent = False
        async with asyncio.timeout(8):
            while "a" not in made.asked[-1].candidates:
                await asyncio.sleep(0.1)
                await made.ask(request(f"t{len(made.asked)}"), on=None)
        await until(lambda: any(each.startswith("t") for each in a.work))

    played(play)


def test_a_request_stays_with_the_only_replica_while_that_is_silent() -> None:
    async def play(made: Scene) -> None:
        await made.have("a")
        await made.ask(request("r", 2))
        a = made.engines["a"]
        a.silent = True
        await asyncio.sleep(2.6)
        a.silent = False
        await a.step(2)
        await until(lambda: "r" in made.finished)
        assert [each.request_id for each in a.added] == ["r"]
        assert not made.failed

    played(play)


def test_a_loop_that_hangs_is_left_until_it_steps_again() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r"))
        a, b = made.engines["a"], made.engines["b"]
        a.work["x"] = a.work["r"]  # another front end's
        await until(lambda: "r#1" in b.work)
        assert made.count("continued_requests_total", reason="hung") == 1
        await made.ask(request("s"), on="b")
        a.steps += 1
        await asyncio.sleep(1.2)
        await made.ask(request("t"), on="a")

    played(play, replace(BOUNDS, silence_s=20))


def test_an_engine_that_works_is_not_taken_for_one_that_hangs() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r", 100))
        for _ in range(40):
            await made.engines["a"].step()
            await asyncio.sleep(0.1)
        assert not made.engines["b"].added

    played(play, replace(BOUNDS, silence_s=20))


def test_what_an_engine_has_forgotten_is_sent_to_it_again() -> None:
    async def play(made: Scene) -> None:
        await made.have("a")
        await made.ask(request("r", 4))
        a = made.engines["a"]
        await a.step(2)
        await until(lambda: made.got == {"r": [0, 1]})
        a.forget()
        await until(lambda: "r#1" in a.work)
        await a.step(2)
        await until(lambda: "r" in made.finished)
        assert made.got == {"r": [0, 1, 2, 3]}
        assert made.count("continued_requests_total", reason="forgotten") == 1

    played(play)


def test_a_request_goes_on_where_its_engine_would_have_it_and_the_others_stay() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b", "c")
        await made.ask(request("r", 4), request("s", 4))
        a, c = made.engines["a"], made.engines["c"]
        await a.step(2)
        await until(lambda: made.got == {"r": [0, 1], "s": [0, 1]})
        await a.ask_to_move("c", "r")
        await until(lambda: "r#1" in c.work and a.aborted == ["r"])
        assert list(a.work) == ["s"]
        assert not made.engines["b"].added
        for each in (a, c):
            await each.step(2)
        await until(lambda: len(made.finished) == 2)
        assert made.got == {"r": [0, 1, 2, 3], "s": [0, 1, 2, 3]}
        assert made.count("continued_requests_total", reason="moved") == 1
        assert made.count("continuation_pause_seconds_count") == 1

    played(play)


@pytest.mark.parametrize("to", ["a", "b", "gone"])
def test_a_request_stays_undisturbed_where_the_other_replica_does_not_take_it(to: str) -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r", 4))
        a = made.engines["a"]
        await made.client.drain("b", 0)
        await a.step(2)
        await a.ask_to_move(to, "r")
        await a.step(2)
        await until(lambda: "r" in made.finished)
        assert made.got == {"r": [0, 1, 2, 3]}
        assert not a.aborted
        assert made.count("continued_requests_total", reason="moved") == 0

    played(play)


def test_a_request_that_has_moved_often_stays() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r", 4))
        for attempt, (at, to) in enumerate([("a", "b"), ("b", "a"), ("a", "b")]):
            wire_id = f"r#{attempt}" if attempt else "r"
            await made.engines[at].ask_to_move(to, wire_id)
            there = made.engines[to].work
            await until(lambda there=there, next_=f"r#{attempt + 1}": next_ in there)  # type: ignore[misc]
        await made.engines["b"].ask_to_move("a", "r#3")
        await made.engines["b"].step(4)
        await until(lambda: "r" in made.finished)
        assert made.count("continued_requests_total", reason="moved") == 3

    played(play)


def test_what_an_engine_aborts_of_itself_goes_on_but_not_for_ever() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r", 4))
        for attempt in range(1, 4):
            await made.engines["a"].step(finish=FinishReason.ABORT)
            if attempt < 3:
                wire_id = f"r#{attempt}"
                await until(lambda wire_id=wire_id: wire_id in made.engines["a"].work)  # type: ignore[misc]
        await until(lambda: "r" in made.failed)
        assert made.got == {"r": []} or not made.got

    played(play)


def test_without_another_replica_a_request_waits_and_then_ends() -> None:
    async def play(made: Scene) -> None:
        await made.have("a")
        await made.ask(request("r"), request("s"))
        made.engines["a"].end()
        await until(lambda: len(made.failed) == 2)
        error = made.failed["r"]
        assert isinstance(error, LostRequestError)
        assert isinstance(error.error, Unavailable)
        assert error.http_status == 503
        assert made.count("uncontinued_requests_total", reason="no_replica") == 2

    played(play)


def test_a_request_that_waits_takes_the_first_replica_that_comes() -> None:
    async def play(made: Scene) -> None:
        await made.ask(request("r"), on=None)
        await asyncio.sleep(0.5)
        await made.have("b")
        await until(lambda: "r" in made.engines["b"].work)

    played(play)


def test_an_engine_that_comes_back_at_its_address_gets_requests_again() -> None:
    async def play(made: Scene) -> None:
        await made.have("a")
        a = made.engines["a"]
        await made.ask(request("r", 4))
        await a.step(2)
        await until(lambda: made.got == {"r": [0, 1]})
        a.end()
        await until(lambda: not made.client.replicas)
        again = PeerEngine(made.folder)
        again.address = a.address
        made.engines["a"] = again.start()
        await until(lambda: "r#1" in again.work)

    played(play, replace(BOUNDS, begun_timeout_s=20))


def test_a_request_with_which_two_engines_end_is_ended_and_not_taken_again() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b", "c")
        await made.ask(request("r"))
        made.engines["a"].end()
        made.first = "b"
        await until(lambda: "r#1" in made.engines["b"].work)
        made.engines["b"].end()
        await until(lambda: "r" in made.failed)
        error = made.failed["r"]
        assert isinstance(error, LostRequestError)
        assert isinstance(error.error, EngineGone)
        assert error.error.code == "query_of_death"
        await made.ask(request("again"), request("other", 3), on=None)
        await until(lambda: "again" in made.failed)
        await until(lambda: set(made.engines["c"].work) == {"other"})

    played(play)


def test_a_request_that_went_past_an_engines_end_survives_the_next() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b", "c")
        await made.ask(request("r", 30))
        await made.engines["a"].step(2)
        await until(lambda: made.got == {"r": [0, 1]})
        made.engines["a"].end()
        b, c = made.engines["b"], made.engines["c"]
        await until(lambda: "r#1" in b.work)
        await b.step(10)
        await until(lambda: len(made.got["r"]) == 12)
        b.end()
        await until(lambda: "r#2" in c.work)
        await c.step(18)
        await until(lambda: "r" in made.finished)
        assert made.got == {"r": list(range(30))}

    played(play)


def test_an_abort_reaches_a_request_wherever_it_is() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r"), request("s"))
        made.engines["a"].end()
        b = made.engines["b"]
        await until(lambda: set(b.work) == {"r#1", "s#1"})
        await made.client.abort_requests_async(["r", "unknown"])
        await until(lambda: b.aborted == ["r#1"])
        b.end()
        await until(lambda: not made.client.replicas)
        await made.client.abort_requests_async(["s"])
        assert not made.client.requests.open
        assert len(made.left) == 4

    played(play)


@pytest.mark.parametrize(
    ("finish", "most", "length"),
    [
        (FinishReason.STOP, 9, 2),
        (FinishReason.LENGTH, 2, None),
        (FinishReason.ERROR, 9, None),
        (None, 9, 2),
    ],
    ids=["stop token", "max_tokens", "error", "stop string"],
)
def test_only_an_answer_that_was_not_cut_off_has_a_length_of_its_own(
    finish: FinishReason | None, most: int, length: int | None
) -> None:
    async def play(made: Scene) -> None:
        await made.have("a")
        context = RoutingContext()
        token = routing_context.set(context)
        await made.ask(request("r", most))
        routing_context.reset(token)
        a = made.engines["a"]
        a.prefill_stats = PrefillStats(3, 3, 0)
        await a.step()
        assert context.usage.own_length is None
        await a.step(finish=finish)
        await until(lambda: made.got == {"r": [0, 1]})
        if finish is None:
            await made.client.abort_requests_async(["r"])
        assert not made.client.requests.open
        assert context.usage.own_length == length

    played(play)


def test_a_router_may_refuse_a_request() -> None:
    async def play(made: Scene) -> None:
        await made.have("a")
        made.refuses = TooManyRequests("too late")
        await made.ask(request("r"), on=None)
        await until(lambda: "r" in made.failed)
        assert str(made.failed["r"]) == "too late"
        made.refuses = RuntimeError("broken")
        await made.ask(request("s"), on=None)
        await until(lambda: "s" in made.failed)
        made.refuses = None
        await made.ask(request("t"))

    played(play)


def test_a_replica_that_is_taken_away_hands_its_requests_over() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r", 4))
        a, b = made.engines["a"], made.engines["b"]
        await a.step()
        await until(lambda: made.got == {"r": [0]})
        made.client.set_replicas({"b": b.address})
        await until(lambda: "r#1" in b.work and a.aborted == ["r"])
        assert set(made.client.replicas) == {"b"}

    played(play)


def test_utilities_reach_all_engines_and_end_with_them() -> None:
    async def play(made: Scene) -> None:
        with pytest.raises(Unavailable):
            await made.client.reset_prefix_cache_async()
        await made.have("a", "b")
        assert await made.client.pin_lora_async(3) == ["pin_lora", 3]
        assert await made.client.call_utility_consensus_async("ask", 1) == ["ask", 1]
        assert await made.client.call_utility_all_async("ask", 1) == [["ask", 1]] * 2
        assert await made.client.reset_prefix_cache_async(True)
        a, b = made.engines["a"], made.engines["b"]
        for engine in (a, b):
            engine._tasks[1].cancel()
        call = asyncio.create_task(made.client.reset_mm_cache_async())
        await asyncio.sleep(0.1)
        a.end()
        with pytest.raises(EngineGone):
            await call

    played(play)

"""A prompt is computed by a prefill replica, and the request goes to the one that answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from loomserve.kvstore.server.protocol import HANDED_OVER, HANDED_OVER_BY, HANDS_OVER
from loomserve.platform.disaggregation.metrics import HandoffMetrics
from loomserve.platform.engine.resumption.travelling import RESUMED
from loomserve.platform.state.roles import Role
from tests.unit.platform.front_end.engine.scene import Scene, played, request, until

HANDING_OVER = {"kv_transfer_params": {HANDS_OVER: True}}


class Pair:
    """A prefill replica, p, and a decode replica, d, with its metrics."""

    def __init__(self, made: Scene) -> None:
        self.made = made
        self.p, self.d = made.engines["p"], made.engines["d"]
        self._registry = CollectorRegistry()
        metrics = HandoffMetrics(self._registry)
        made.client.handoffs.metrics_of = lambda name: metrics if name == "d" else None

    def outcomes(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == "loomserve_handoffs_total"
        }

    def figure(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"loomserve_handoff_{name}", labels) or 0.0


def with_pair(play: Callable[[Scene, Pair], Awaitable[None]]) -> None:
    async def run(made: Scene) -> None:
        made.first = "d"
        made.roles = {"p": Role.PREFILL, "d": Role.DECODE}
        await made.have("p", "d")
        await play(made, Pair(made))
        assert not made.client.requests.open
        assert sorted(id(asked) for asked in made.asked) == sorted(id(one) for one, _ in made.left)

    played(run)


def test_a_prompt_is_computed_at_one_replica_and_answered_by_another() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        await made.ask(request("r", 4, min_tokens=3, stop=["x"], seed=1), on="p")
        (prompt,) = pair.p.added
        assert prompt.sampling_params.extra_args == HANDING_OVER
        assert prompt.sampling_params.max_tokens == 1
        assert (prompt.sampling_params.min_tokens, prompt.sampling_params.seed) == (1, 1)
        await pair.p.step()
        await until(lambda: "r#1" in pair.d.work)
        assert made.got == {"r": [0]}
        assert not pair.p.work
        assert not pair.p.aborted
        rest = pair.d.work["r#1"].request.sampling_params
        assert rest.extra_args == {RESUMED: [0], "kv_transfer_params": {HANDED_OVER: 3}}
        assert (rest.max_tokens, rest.min_tokens, rest.stop) == (4, 3, ["x"])
        pair.d.prefill_stats = PrefillStats(3, 1, 2)
        await pair.d.step(3)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        assert made.got == {"r": [0, 1, 2, 3]}
        assert made.prefills == 0, "the second is none of the front end's"
        answers, prompts = made.asked
        assert (answers.prompt_only, answers.max_tokens) == (False, 4)
        assert (prompts.prompt_only, prompts.max_tokens) == (True, 1)
        assert prompts.candidates == {"p"}
        assert made.left == [(prompts, "p"), (answers, "d")], "one is booked for all the time"
        assert pair.outcomes() == {"continued": 1}
        assert pair.figure("seconds_count") == 1
        assert pair.figure("tokens_total", source="store") == 2
        assert pair.figure("tokens_total", source="recomputed") == 1
        assert made.count("continuation_pause_seconds_count") == 0

    with_pair(play)


def test_the_second_engine_is_told_which_node_has_it_and_the_client_is_not() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        pair.p.kv_transfer = {HANDED_OVER_BY: "n1", "other": 1}
        await made.ask(request("r", 4), on="p")
        await pair.p.step()
        await until(lambda: "r#1" in pair.d.work)
        rest = pair.d.work["r#1"].request.sampling_params
        said = {HANDED_OVER: 3, HANDED_OVER_BY: "n1"}
        assert rest.extra_args == {RESUMED: [0], "kv_transfer_params": said}
        await pair.d.step(3)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        assert made.told == {"r": {"other": 1}}

    with_pair(play)


@pytest.mark.parametrize(
    ("params", "engine_says", "told"),
    [
        ({"tokens": 1}, None, FinishReason.LENGTH),
        ({"stop_token_ids": [0]}, FinishReason.STOP, FinishReason.STOP),
    ],
)
def test_an_answer_ends_at_the_prefill_replica_if_its_first_token_is_its_last(
    params: dict[str, Any], engine_says: FinishReason | None, told: FinishReason
) -> None:
    async def play(made: Scene, pair: Pair) -> None:
        await made.ask(request("r", **params), on="p")
        await pair.p.step(finish=engine_says)
        await until(lambda: made.finished == {"r": told})
        assert made.got == {"r": [0]}
        assert not pair.d.added
        assert pair.outcomes() == {"continued": 1}

    with_pair(play)


def test_what_is_short_or_cannot_be_shared_stays_where_it_is_answered() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        short = EngineCoreRequest(
            "short", [1, 2], None, SamplingParams(max_tokens=1), None, 0.0, None, None, None
        )
        own = request("own", 1, extra_args={"kv_transfer_params": {HANDS_OVER: True}})
        await made.ask(short, own, request("logprobs", 1, prompt_logprobs=1), on="d")
        await pair.d.step()
        await until(lambda: len(made.finished) == 3)
        assert not pair.p.added
        assert pair.outcomes() == {"local": 3}

    with_pair(play)


def test_unified_replicas_compute_prompts_themselves() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        made.roles["d"] = Role.UNIFIED
        await made.ask(request("r", 1), on="d")
        await pair.d.step()
        await until(lambda: len(made.finished) == 1)
        assert not pair.p.added
        assert pair.outcomes() == {}

    with_pair(play)


@pytest.mark.parametrize("end", ["killed", "aborted", "failed"])
def test_whoever_answers_computes_the_prompt_when_the_prefill_replica_does_not(end: str) -> None:
    async def play(made: Scene, pair: Pair) -> None:
        await made.ask(request("r", 3, seed=1), on="p")
        if end == "killed":
            pair.p.end()
        else:
            how = FinishReason.ABORT if end == "aborted" else FinishReason.ERROR
            await pair.p.step(finish=how, tokens=0)
        await until(lambda: "r#1" in pair.d.work)
        params = pair.d.work["r#1"].request.sampling_params
        assert (params.extra_args, params.max_tokens) == (None, 3)
        await pair.d.step(3)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        assert made.got == {"r": [0, 1, 2]}
        assert pair.outcomes() == {"prefill_away": 1}

    with_pair(play)


def test_without_a_prefill_replica_prompts_are_computed_where_they_are_answered() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        pair.p.end()
        await until(lambda: set(made.client.replicas) == {"d"})
        await made.ask(request("r", 1), on="d")
        await pair.d.step()
        await until(lambda: len(made.finished) == 1)
        assert pair.outcomes() == {"prefill_away": 1}

    with_pair(play)


@pytest.mark.parametrize("end", ["killed", "becomes a prefill replica"])
def test_another_replica_answers_when_the_chosen_one_does_not_any_more(end: str) -> None:
    async def play(made: Scene, pair: Pair) -> None:
        await made.have("p", "d", "z")
        await made.ask(request("r", 3), on="p")
        made.first = "z"
        if end == "killed":
            pair.d.end()
            await until(lambda: "d" not in made.client.replicas)
        else:
            made.roles["d"] = Role.PREFILL
        await pair.p.step()
        z = made.engines["z"]
        await until(lambda: "r#1" in z.work)
        extra = z.work["r#1"].request.sampling_params.extra_args
        assert extra == {RESUMED: [0], "kv_transfer_params": {HANDED_OVER: 3}}
        await z.step(2)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        assert made.got == {"r": [0, 1, 2]}

    with_pair(play)


def test_the_prefill_replica_answers_when_no_other_is_left() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        await made.ask(request("r", 3), on="p")
        pair.d.end()
        await until(lambda: set(made.client.replicas) == {"p"})
        await pair.p.step()
        await until(lambda: "r#1" in pair.p.work)
        await pair.p.step(2)
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        assert made.got == {"r": [0, 1, 2]}

    with_pair(play)


def test_a_prefill_replica_that_becomes_a_decode_replica_ends_what_it_began() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        await made.ask(request("r", 2), on="p")
        made.roles = {"p": Role.DECODE, "d": Role.UNIFIED}
        await pair.p.step()
        await until(lambda: "r#1" in pair.d.work)
        await pair.d.step()
        await until(lambda: made.finished == {"r": FinishReason.LENGTH})
        assert made.got == {"r": [0, 1]}

    with_pair(play)


def test_an_answer_goes_on_when_its_replica_ends_after_the_hand_off() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        await made.have("p", "d", "z")
        await made.ask(request("r", 4), request("s", 4), on="p")
        await pair.p.step()
        await until(lambda: set(pair.d.work) == {"r#1", "s#1"})
        pair.d.work.pop("s#1")
        await pair.d.step()
        await until(lambda: made.got == {"r": [0, 1], "s": [0]})
        made.first = "z"
        pair.d.end()
        z = made.engines["z"]
        await until(lambda: set(z.work) == {"r#2", "s#2"})
        extra = {name: z.work[name].request.sampling_params.extra_args for name in z.work}
        assert extra == {
            "r#2": {RESUMED: [0, 1]},
            "s#2": {RESUMED: [0], "kv_transfer_params": {HANDED_OVER: 3}},
        }
        await z.step(3)
        await until(lambda: len(made.finished) == 2)
        assert made.got == {"r": [0, 1, 2, 3], "s": [0, 1, 2, 3]}

    with_pair(play)


def test_a_request_that_nobody_waits_for_ends_at_both() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        await made.ask(request("r"), request("s"), on="p")
        await made.client.abort_requests_async(["r"])
        await until(lambda: pair.p.aborted == ["r"])
        await pair.p.step()
        await until(lambda: "s#1" in pair.d.work)
        await made.client.abort_requests_async(["s"])
        await until(lambda: pair.d.aborted == ["s#1"])
        assert pair.outcomes() == {"continued": 1}

    with_pair(play)


def test_a_router_that_finds_no_prefill_replica_costs_nothing_else() -> None:
    async def play(made: Scene, pair: Pair) -> None:
        made.refuses_prompts = RuntimeError("broken")
        await made.ask(request("r", 1), on="d")
        await pair.d.step()
        await until(lambda: len(made.finished) == 1)
        assert pair.outcomes() == {"prefill_away": 1}
        made.asked = [each for each in made.asked if not each.prompt_only]

    with_pair(play)

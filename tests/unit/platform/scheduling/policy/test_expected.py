"""Predicted lengths in the engine's queue: how they travel, and what becomes of wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.scheduling.policy.hints import EXPECTED, Expected, expected_of
from loomserve.platform.scheduling.simulator import (
    Costs,
    Limits,
    Policies,
    SimulatedRequest,
)
from tests.simulations import Simulation, simulate

CHAT = "/v1/chat/completions"
predictions = st.builds(
    lambda tokens, more: Expected(tokens, tokens + more), st.floats(0, 1e4), st.floats(0, 1e4)
)


@given(predictions, st.sampled_from([None, {}, {"other": "1"}]))
def test_a_prediction_reaches_the_engine_as_it_left(
    expected: Expected, own: dict[str, Any] | None
) -> None:
    request = {"model": "chat", "vllm_xargs": own}
    sent = json.loads(EngineRequest(CHAT, request).with_hints(expected=expected).encoded)
    assert expected_of(sent["vllm_xargs"]) == expected
    assert set(sent["vllm_xargs"]) == {*(own or {}), EXPECTED}


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 5, "5", [], [5], [5, 6, 7], [5, "6"], [True, 6], [6, 5], [-1, 5]),
        *([float("nan"), 5], [5, float("nan")], [5, float("inf")], [5, 10**400], {"tokens": 5}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_nonsense_is_no_prediction(value: object) -> None:
    assert expected_of({EXPECTED: value}) is None


def test_a_client_that_sets_the_platforms_own_field_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"models\[\]\.lengths") as refused:
        EngineRequest.of_fields(CHAT, {"vllm_xargs": {EXPECTED: [1, 2]}})
    assert refused.value.body()["error"]["param"] == EXPECTED
    for extra in (None, "odd", {"other": 1}):
        EngineRequest.of_fields(CHAT, {"vllm_xargs": extra})


@pytest.mark.parametrize(
    ("generated", "answer"),
    [(0, 20), (19, 20), (20, 61), (60, 61), (61, 500), (499, 500), (500, 500)],
)
def test_an_answer_that_exceeds_a_bound_is_taken_to_reach_the_next(
    generated: int, answer: int
) -> None:
    assert Expected(20.0, 60.5).answer(generated, 500) == answer


@given(predictions, st.integers(0, 20_000), st.integers(1, 20_000))
def test_something_is_left_of_whatever_runs_and_no_more_than_is_allowed(
    expected: Expected, generated: int, longest: int
) -> None:
    answer = expected.answer(generated, longest)
    assert answer <= longest
    assert answer > generated or generated >= longest


COSTS = Costs(
    swap_s=lambda tokens: 0.0,
    recompute_s=lambda tokens: tokens / 1000,
    step_s=lambda step: 1.0,
    token_s=1.0,
)
ROOM = Limits(blocks=1000, block_tokens=16, block_bytes=1, running=1, step_tokens=512)


def request(name: str, output: int, expected: Expected | None, **more: Any) -> SimulatedRequest:
    return SimulatedRequest(
        name=name,
        arrived_s=more.pop("arrived_s", 0.0),
        prompt_tokens=16,
        output_tokens=output,
        max_tokens=500,
        expected=expected,
        **more,
    )


def served(queue: str, *requests: SimulatedRequest, limits: Limits = ROOM) -> Simulation:
    return simulate(requests, limits, Policies(queue=queue), COSTS)


def test_the_request_of_the_shorter_prediction_is_served_first() -> None:
    long, short = Expected(200, 300), Expected(10, 20)
    times = served("sjf", request("long", 200, long), request("short", 10, short)).times
    assert times["short"].finished_s < times["long"].finished_s
    # Where nothing is predicted, both may be as long, so that names decide.
    blind = served("sjf", request("long", 200, None), request("short", 10, None)).times
    assert blind["short"].finished_s > blind["long"].finished_s


def test_a_request_that_exceeds_its_prediction_leaves_its_place_in_the_order() -> None:
    # Memory for one of them beyond a few blocks: the last in the order must go.
    tight = Limits(blocks=34, block_tokens=16, block_bytes=1, running=2, step_tokens=512)
    liar = request("liar", 400, Expected(5, 10))
    honest = [
        request(f"honest {number}", 100, Expected(100, 120), arrived_s=10.0 * number)
        for number in range(3)
    ]
    times = served("sjf", liar, *honest, limits=tight).times
    assert max(times[one.name].finished_s for one in honest) < times["liar"].finished_s


@given(st.lists(st.tuples(st.integers(1, 60), predictions), min_size=1, max_size=6))
def test_however_wrong_the_predictions_are_all_requests_end(
    drawn: list[tuple[int, Expected]],
) -> None:
    requests = [request(str(at), output, guess) for at, (output, guess) in enumerate(drawn)]
    for queue in ("sjf", "deadline", "fair"):
        assert len(served(queue, *requests).times) == len(requests)


def test_of_two_deadlines_that_with_less_slack_is_served_first() -> None:
    early = request("early", 10, Expected(10, 20), deadline_s=90.0)
    late_but_long = request("long", 80, Expected(80, 90), deadline_s=95.0)
    times = served("deadline", early, late_but_long).times
    assert times["long"].finished_s <= 95.0
    assert times["early"].finished_s > times["long"].finished_s
    blind = [request("early", 10, None, deadline_s=90.0), request("long", 80, None, deadline_s=95)]
    by_deadline = served("deadline", *blind).times
    assert by_deadline["early"].finished_s < by_deadline["long"].finished_s


def test_a_deadline_that_cannot_be_met_makes_no_other_one_late() -> None:
    hopeless = request("hopeless", 400, Expected(400, 450), deadline_s=50.0)
    fine = request("fine", 40, Expected(40, 50), deadline_s=60.0)
    assert served("deadline", hopeless, fine).times["fine"].finished_s <= 60.0
    without = [request("hopeless", 400, None, deadline_s=50.0)]
    without += [request("fine", 40, None, deadline_s=60.0)]
    assert served("deadline", *without).times["fine"].finished_s > 60.0

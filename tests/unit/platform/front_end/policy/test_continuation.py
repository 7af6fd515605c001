"""What becomes of requests whose replica is lost: rules, and what holds for all that may happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.front_end.policy.continuation import (
    BLAMED,
    Action,
    AnswerLimits,
    ContinuationBounds,
    Death,
    Ending,
    Loss,
    ReplicaView,
    RequestView,
    ending,
    loss,
    next_action,
    suspicions,
)

BOUNDS = ContinuationBounds()
ENDS = {Action.END_SUSPECT, Action.END_STALLED, Action.END_TOO_OFTEN, Action.END_NO_REPLICA}

losses = st.sampled_from(Loss) | st.none()
requests = st.builds(
    RequestView,
    placed=st.booleans(),
    tokens=st.integers(0, 100),
    deaths=st.lists(st.builds(Death, st.integers(0, 100), st.integers(0, 20)), max_size=5),
    moves=st.integers(0, 6),
    waiting_since=st.none() | st.floats(0, 100),
)


@pytest.mark.parametrize(
    ("heard_ago_s", "stepped_ago_s", "open_requests", "draining", "expected"),
    [
        (2.9, 0, 3, False, None),
        (3.1, 0, 3, False, Loss.SILENT),
        (3.1, 0, 0, True, Loss.SILENT),
        (0, 61, 3, False, Loss.HUNG),
        (0, 61, 0, False, None),
        (0, 61, 1, True, Loss.HUNG),
        (0, 0, 1, True, Loss.DRAINED),
    ],
)
def test_a_replica_is_lost_by_silence_a_loop_that_hangs_or_on_purpose(
    heard_ago_s: float, stepped_ago_s: float, open_requests: int, draining: bool, expected: Loss
) -> None:
    view = ReplicaView(100 - heard_ago_s, 100 - stepped_ago_s, open_requests, draining)
    assert loss(view, 100, BOUNDS) is expected


def test_a_request_is_no_suspect_once_it_has_gone_past_the_end_of_that_engine() -> None:
    request = RequestView(tokens=10, deaths=(Death(10),))
    assert len(suspicions(request, BOUNDS)) == 1
    assert len(suspicions(replace(request, tokens=17), BOUNDS)) == 1
    assert not suspicions(replace(request, tokens=18), BOUNDS)


def test_a_request_with_which_two_engines_ended_at_once_is_ended() -> None:
    once = RequestView(tokens=5, deaths=(Death(5),))
    assert next_action(once, Loss.GONE, others=True, now=0, bounds=BOUNDS) is Action.GO_ON
    twice = RequestView(tokens=7, deaths=(Death(5), Death(7)))
    assert next_action(twice, Loss.GONE, others=True, now=0, bounds=BOUNDS) is Action.END_SUSPECT


def test_a_request_is_called_deadly_only_if_engines_have_ended() -> None:
    still, ended = Death(5, ended=False), Death(5)
    for deaths, expected in (
        ((still,), Action.GO_ON),
        ((still, still), Action.END_STALLED),
        ((still, ended), Action.END_STALLED),
        ((ended, ended), Action.END_SUSPECT),
    ):
        request = RequestView(tokens=5, deaths=deaths)
        assert next_action(request, Loss.HUNG, others=True, now=0, bounds=BOUNDS) is expected
    line = RequestView(tokens=5, deaths=(still,), carried_on=False)
    assert next_action(line, Loss.HUNG, others=True, now=0, bounds=BOUNDS) is Action.GO_ON


def test_a_connection_that_is_cut_again_and_again_is_not_gone_on_with() -> None:
    request = RequestView(tokens=5, moves=3)
    assert next_action(request, Loss.CUT, others=True, now=0, bounds=BOUNDS) is Action.GO_ON
    again = replace(request, moves=4)
    assert next_action(again, Loss.CUT, others=True, now=0, bounds=BOUNDS) is Action.END_TOO_OFTEN


def test_a_request_is_carried_over_three_ends_of_engines_and_not_over_four() -> None:
    for deaths, expected in (
        ((10, 20, 30), Action.GO_ON),
        ((10, 20, 30, 40), Action.END_TOO_OFTEN),
    ):
        request = RequestView(tokens=deaths[-1], deaths=tuple(map(Death, deaths)))
        assert next_action(request, Loss.GONE, others=True, now=0, bounds=BOUNDS) is expected


def test_draining_is_never_too_often() -> None:
    request = RequestView(placed=True, tokens=100, deaths=tuple(map(Death, (10, 20, 30))), moves=50)
    assert next_action(request, Loss.DRAINED, others=True, now=0, bounds=BOUNDS) is Action.GO_ON


def test_a_silent_replica_is_stayed_with_after_three_moves() -> None:
    request = RequestView(placed=True, moves=3)
    assert next_action(request, Loss.SILENT, others=True, now=0, bounds=BOUNDS) is Action.WAIT
    elsewhere = replace(request, placed=False)
    assert next_action(elsewhere, Loss.SILENT, others=True, now=0, bounds=BOUNDS) is Action.GO_ON


@given(requests, losses, st.booleans(), st.floats(100, 1000))
def test_no_request_waits_for_longer_than_it_may_unless_it_is_computed_meanwhile(
    request: RequestView, lost: Loss | None, others: bool, now: float
) -> None:
    since = now if request.waiting_since is None else request.waiting_since
    decided = next_action(request, lost, others=others, now=now, bounds=BOUNDS)
    if decided is Action.WAIT and not (request.placed and lost not in (Loss.SILENT, Loss.HUNG)):
        patience_s = BOUNDS.begun_timeout_s if request.tokens else BOUNDS.reroute_timeout_s
        assert now - since < patience_s


def test_an_answer_that_has_begun_waits_for_longer() -> None:
    late = 1.0 + BOUNDS.reroute_timeout_s
    waiting = RequestView(waiting_since=0.0)
    assert (
        next_action(waiting, None, others=False, now=late, bounds=BOUNDS) is Action.END_NO_REPLICA
    )
    begun = replace(waiting, tokens=1)
    assert next_action(begun, Loss.GONE, others=False, now=late, bounds=BOUNDS) is Action.WAIT
    late = 1.0 + BOUNDS.begun_timeout_s
    assert (
        next_action(begun, Loss.GONE, others=False, now=late, bounds=BOUNDS)
        is Action.END_NO_REPLICA
    )


@given(requests, losses, st.floats(0, 1000))
def test_a_request_goes_on_only_if_there_is_where(
    request: RequestView, lost: Loss | None, now: float
) -> None:
    alone = next_action(request, lost, others=False, now=now, bounds=BOUNDS)
    assert alone is not Action.GO_ON
    not_alone = next_action(request, lost, others=True, now=now, bounds=BOUNDS)
    assert not_alone in ENDS | {Action.GO_ON, Action.WAIT}
    if alone in (Action.END_SUSPECT, Action.END_STALLED, Action.END_TOO_OFTEN):
        assert not_alone is alone, "another replica makes it no less suspect"


@given(st.lists(st.integers(0, 20), max_size=20), st.sampled_from([*BLAMED]))
def test_a_request_can_end_four_engines_at_most_and_one_that_stands_still_two(
    gained: list[int], lost: Loss
) -> None:
    tokens, deaths = 0, list[Death]()
    for more in gained:
        tokens += more
        deaths.append(Death(tokens, given=more))
        request = RequestView(tokens=tokens, deaths=deaths)
        if next_action(request, lost, others=True, now=0, bounds=BOUNDS) is not Action.GO_ON:
            break
    assert len(deaths) <= BOUNDS.most_losses + 1
    if not any(gained):
        assert len(deaths) <= BOUNDS.most_suspected


def test_a_request_that_an_engine_had_answered_for_a_while_is_not_suspected_of_its_end() -> None:
    bystander = RequestView(tokens=40, deaths=(Death(40, given=30),))
    assert not suspicions(bystander, BOUNDS)
    with_the_cause_again = replace(bystander, deaths=(*bystander.deaths, Death(40, given=0)))
    assert len(suspicions(with_the_cause_again, BOUNDS)) == 1
    decided = next_action(with_the_cause_again, Loss.GONE, others=True, now=0, bounds=BOUNDS)
    assert decided is Action.GO_ON


def test_a_suspect_goes_back_to_who_tests_it_itself() -> None:
    suspect = RequestView(tokens=1, deaths=(Death(1),), carried_on=False)
    assert next_action(suspect, Loss.GONE, others=True, now=0, bounds=BOUNDS) is Action.END_RETURNED
    for harmless in (replace(suspect, tokens=20), replace(suspect, deaths=(Death(20, 20),))):
        assert next_action(harmless, Loss.GONE, others=True, now=0, bounds=BOUNDS) is Action.GO_ON
    assert next_action(
        replace(suspect, deaths=()), Loss.DRAINED, others=True, now=0, bounds=BOUNDS
    ) is (Action.GO_ON)


LIMITS = AnswerLimits(
    prompt_tokens=4, max_tokens=5, max_model_len=100, eos_token=0, stop_tokens=frozenset({7})
)


@pytest.mark.parametrize(
    ("tokens", "limits", "expected"),
    [
        ([], LIMITS, None),
        ([1, 2], LIMITS, None),
        ([1, 0], LIMITS, Ending("stop")),
        ([1, 7], LIMITS, Ending("stop", 7)),
        ([7, 1], LIMITS, None),
        ([1, 2, 3, 4, 5], LIMITS, Ending("length")),
        ([1, 2, 3, 4, 7], LIMITS, Ending("stop", 7)),
        ([1, 0], replace(LIMITS, eos_token=None), None),
        ([1, 2], replace(LIMITS, max_model_len=6, max_tokens=None), Ending("length")),
    ],
)
def test_an_answer_has_ended_as_vllm_would_have_ended_it(
    tokens: list[int], limits: AnswerLimits, expected: Ending | None
) -> None:
    assert ending(tokens, limits) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_an_answer_that_has_ended_by_its_tokens_is_one_that_vllm_ends(tokens: list[int]) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.request import Request, RequestStatus

    params = SamplingParams(max_tokens=5, stop_token_ids=[7])
    params._eos_token_id = 0
    request = Request("r", [1, 2, 3, 4], params, None)
    request.append_output_token_ids(tokens)
    stopped = check_stop(request, LIMITS.max_model_len)
    names = {
        RequestStatus.FINISHED_STOPPED: "stop",
        RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    }
    ours = ending(tokens, LIMITS)
    if not stopped:
        assert ours is None
    else:
        assert ours == Ending(names[request.status], request.stop_reason)  # type: ignore[arg-type]


@given(request=requests, lost=losses, others=st.booleans())
def test_an_answer_that_cannot_be_resumed_goes_nowhere_else(
    request: RequestView, lost: Loss | None, others: bool
) -> None:
    bounds = replace(BOUNDS, resumes=False)
    found = next_action(request, lost, others=others, now=100, bounds=bounds)
    if not request.tokens:
        assert found is next_action(request, lost, others=others, now=100, bounds=BOUNDS)
    elif request.placed:
        assert found is not Action.GO_ON
    else:
        assert found in {*ENDS, Action.END_RETURNED}

"""A request that goes to an engine on a machine whose clocks show other times."""

from __future__ import annotations

import time

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from loomserve.platform.engine.resumption.travelling import by_age, by_own_clocks
from loomserve.platform.scheduling.policy.hints import DEADLINE, deadline_of


def request(params: SamplingParams | None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time() - 3,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@pytest.mark.parametrize("skew_s", [-1e6, -10.0, 0.0, 10.0, 1e6])
def test_a_deadline_is_as_far_and_an_arrival_as_long_ago_as_where_it_came(
    skew_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SamplingParams(extra_args={DEADLINE: time.monotonic() + 5, "mine": 1})
    sent = request(own)
    frames = MsgpackEncoder().encode(by_age(sent))
    deadline, wall = deadline_of(own.extra_args), time.time
    assert deadline is not None
    assert deadline > time.monotonic() + 4, "what is sent again has its own deadline"
    assert sent.arrival_time < wall() - 2

    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + skew_s)
    monkeypatch.setattr(time, "time", lambda: wall() - 3 * skew_s)
    came = by_own_clocks(MsgpackDecoder(EngineCoreRequest).decode(frames))
    assert came.sampling_params is not None
    args = came.sampling_params.extra_args
    assert args is not None
    left_s = (deadline_of(args) or 0.0) - time.monotonic()
    assert left_s == pytest.approx(5, abs=0.5)
    assert args["mine"] == 1
    assert time.time() - came.arrival_time == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize("params", [None, SamplingParams(), SamplingParams(extra_args={"a": 1})])
def test_a_request_without_a_deadline_has_none(params: SamplingParams | None) -> None:
    came = by_own_clocks(by_age(request(params)))
    assert came.sampling_params is params
    assert time.time() - came.arrival_time == pytest.approx(3, abs=0.5)

"""A simulated engine, step by step, by a clock of the test's."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.kvstore.server.protocol import HANDED_OVER
from loomserve.platform.engine.resumption.travelling import RESUMED
from loomserve.platform.engine.scheduling.device_time import take_device_s
from loomserve.platform.scheduling.policy.hints import BACKGROUND
from loomserve.platform.simulated.engine import SimulatedEngine
from loomserve.platform.simulated.options import SIMULATED_CONFIG, EngineOptions
from loomserve.platform.simulated.wire import EventType, FinishReason, Output, WireRequest

PROMPT = [*range(100, 140)]


def engine(**given: Any) -> SimulatedEngine:
    simulated = {"kv_tokens": 1024, "step_ms": 10, "token_ms": 1, "request_ms": 0}
    simulated |= {"context_token_ms": 0, "attention_pair_ms": 0} | given.pop("simulated", {})
    options = {
        "kv_cache_memory_bytes": 1,
        "max_model_len": 256,
        "block_size": 16,
        "additional_config": {SIMULATED_CONFIG: simulated, "loomserve": given.pop("policies", {})},
        **given,
    }
    return SimulatedEngine(EngineOptions.of(options))


def request(name: str, prompt: list[int] = PROMPT, tokens: int = 8, **params: Any) -> WireRequest:
    given = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params}
    return WireRequest(name, prompt, None, given, None, 0.0, None, None)


class Clock:
    """Runs an engine, and keeps what it puts out."""

    def __init__(self, of: SimulatedEngine) -> None:
        self.engine, self.now = of, 0.0
        self.outputs: dict[str, list[Output]] = {}
        self.stats: Any = None

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            seconds = self.engine.begin(self.now)
            assert seconds is not None
            self.now += seconds
            for of_one in self.engine.end(self.now).values():
                self.stats = of_one.scheduler_stats or self.stats
                for each in of_one.outputs:
                    self.outputs.setdefault(each.request_id, []).append(each)

    def run(self) -> None:
        while not self.engine.is_idle:
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for each in self.outputs[name] for token in each.new_token_ids]


def ran(of: SimulatedEngine, *requests: WireRequest) -> Clock:
    clock = Clock(of)
    for each in requests:
        of.add(each, 1, clock.now)
    clock.run()
    return clock


def test_a_step_takes_what_the_cost_model_says() -> None:
    clock = Clock(engine())
    clock.engine.add(request("r"), 1, 0.0)
    clock.step()
    assert clock.now == pytest.approx(0.010 + 0.040), "a prompt of 40 tokens"
    clock.step(7)
    assert clock.now == pytest.approx(0.050 + 7 * 0.011)
    assert clock.engine.is_idle


def test_a_prompt_is_computed_in_chunks_and_the_first_token_tells_of_it() -> None:
    clock = Clock(engine(max_num_batched_tokens=16))
    clock.engine.add(request("r"), 1, 0.0)
    clock.step(2)
    assert not clock.outputs
    clock.step()
    (first,) = clock.outputs["r"]
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_computed_tokens == 40
    assert [each.type for each in first.events or ()] == [EventType.QUEUED, EventType.SCHEDULED]
    assert [each.timestamp for each in first.events or ()] == [0.0, 0.0]


def test_the_last_output_ends_the_request_and_tells_its_share_of_the_time() -> None:
    clock = ran(engine(), request("a"), request("b", [*range(200, 240)]))
    ends = {name: each[-1] for name, each in clock.outputs.items()}
    assert {each.finish_reason for each in ends.values()} == {FinishReason.LENGTH}
    seconds = [take_device_s(each) for each in ends.values()]  # type: ignore[arg-type]
    assert sum(each or 0 for each in seconds) == pytest.approx(clock.now)


def test_outputs_go_to_the_client_that_asked() -> None:
    of = engine()
    of.add(request("a"), 1, 0.0)
    of.add(request("b"), 2, 0.0)
    of.begin(0.0)
    outputs = of.end(0.1)
    assert {index: [one.request_id for one in each.outputs] for index, each in outputs.items()} == {
        1: ["a"],
        2: ["b"],
    }


def test_a_common_beginning_is_computed_once() -> None:
    of = engine()
    ran(of, request("a"))
    clock = ran(of, request("b", [*PROMPT, 1]))
    first = clock.outputs["b"][0]
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_cached_tokens == 32, "two whole blocks of 16"
    assert first.prefill_stats.num_computed_tokens == 9
    of.reset_prefix_cache()
    assert ran(of, request("c")).outputs["c"][0].prefill_stats.num_cached_tokens == 0  # type: ignore[union-attr]


def test_tenants_and_engines_without_a_prefix_cache_share_nothing() -> None:
    for of, salt in ((engine(), "other"), (engine(enable_prefix_caching=False), None)):
        ran(of, request("a"))
        other = request("b")
        other.cache_salt = salt
        assert ran(of, other).outputs["b"][0].prefill_stats.num_cached_tokens == 0  # type: ignore[union-attr]


def test_a_request_that_goes_on_here_gets_the_rest_of_the_same_answer() -> None:
    whole = ran(engine(), request("r")).tokens("r")
    resumed = request("r#1", extra_args={RESUMED: whole[:3]})
    clock = ran(engine(), resumed)
    assert clock.tokens("r#1") == whole[3:]
    assert clock.outputs["r#1"][0].prefill_stats is None, "its client knows of its prompt"


def test_a_prompt_that_was_handed_over_is_not_computed_again() -> None:
    whole = ran(engine(), request("r")).tokens("r")
    extra = {RESUMED: whole[:1], "kv_transfer_params": {HANDED_OVER: len(PROMPT)}}
    clock = ran(engine(), request("r#1", extra_args=extra))
    told = clock.outputs["r#1"][0].prefill_stats
    assert told is not None
    assert (told.num_external_cached_tokens, told.num_computed_tokens) == (40, 0)
    assert clock.now == pytest.approx(7 * 0.011)


def test_too_little_memory_preempts_and_all_have_their_answers_all_the_same() -> None:
    small = {"simulated": {"kv_tokens": 96}, "max_model_len": 96}
    prompts = [[*range(n, n + 30)] for n in (0, 100, 200)]
    clock = ran(engine(**small), *(request(f"r{n}", each, 30) for n, each in enumerate(prompts)))
    alone = [
        ran(engine(**small), request("r", each, 30)).tokens("r") for n, each in enumerate(prompts)
    ]
    assert [clock.tokens(f"r{n}") for n in range(3)] == alone
    events = [
        event.type for each in clock.outputs.values() for one in each for event in one.events or ()
    ]
    assert EventType.PREEMPTED in events


def test_who_waits_is_counted_and_gone_with_its_abort() -> None:
    clock = Clock(engine(max_num_seqs=1))
    clock.engine.add(request("a"), 1, 0.0)
    clock.engine.add(request("b"), 1, 0.0)
    clock.step()
    running, waiting, usage = clock.engine.load
    assert (running, waiting) == (1, 1)
    assert usage == pytest.approx(3 * 16 / 1024)
    clock.engine.abort(["b"])
    assert clock.engine.load[:2] == (1, 0)
    clock.engine.abort(["a", "a"])
    assert clock.engine.load == (0, 0, 0.0)
    assert clock.engine.is_idle


def test_background_requests_make_way() -> None:
    clock = Clock(engine(max_num_seqs=1))
    clock.engine.add(request("batch", extra_args={BACKGROUND: 1}), 1, 0.0)
    clock.step(2)
    clock.engine.add(request("chat", [*range(300, 340)]), 1, clock.now)
    clock.run()
    assert [*clock.outputs] == ["batch", "chat"]
    assert clock.tokens("batch") == ran(engine(), request("batch")).tokens("batch")
    chat_ended = clock.outputs["chat"][-1]
    assert chat_ended.finish_reason is FinishReason.LENGTH
    went_on = clock.outputs["batch"][2]
    assert [each.type for each in went_on.events or ()] == [
        EventType.PREEMPTED,
        EventType.SCHEDULED,
    ]


def test_it_says_which_requests_could_leave() -> None:
    clock = Clock(engine(max_num_seqs=2, max_num_batched_tokens=48))
    for name, prompt in (("runs", PROMPT), ("prefills", [*range(200)]), ("waits", PROMPT)):
        clock.engine.add(request(name, prompt), 1, clock.now)
    clock.step()
    assert {each.id: each.waits for each in clock.engine.staying()} == {
        "runs": False,
        "waits": True,
    }


def test_log_probabilities_have_as_many_tokens_as_were_asked_for() -> None:
    clock = ran(engine(), request("r", tokens=1, logprobs=2))
    tokens, values, ranks, _ = clock.outputs["r"][0].new_logprobs
    assert tokens[1] == values[1] == (1, 3)
    assert ranks[1] == (1,)


@pytest.mark.parametrize(
    "wrong",
    [
        request("r", []),
        request("r", structured_outputs={"json": "{}"}),
        request("r", tokens=2, extra_args={RESUMED: [1, 2]}),
    ],
)
def test_what_it_cannot_answer_is_refused_and_leaves_nothing(wrong: WireRequest) -> None:
    of = engine()
    with pytest.raises(ValueError, match=r"simulated|leave nothing"):
        of.add(wrong, 1, 0.0)
    assert of.is_idle
    assert of.load == (0, 0, 0.0)


def test_memory_that_does_not_hold_the_longest_request_is_refused() -> None:
    with pytest.raises(ValueError, match="KV memory holds 64"):
        engine(simulated={"kv_tokens": 64})

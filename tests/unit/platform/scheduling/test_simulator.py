"""The simulated schedule: worked examples, what no schedule may break, and who starves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.config.scheduling import QUEUE_ORDERS
from loomserve.platform.scheduling.policy.preemption import PREEMPTIONS, PreemptionMode
from loomserve.platform.scheduling.simulator import (
    Costs,
    Limits,
    Policies,
    ScheduledStep,
    SimulatedRequest,
    StepShare,
)
from tests.simulations import Simulation, replay, simulate

BLOCK_TOKENS = 4
BLOCK_BYTES = 100
LIMITS = Limits(
    blocks=12,
    block_tokens=BLOCK_TOKENS,
    block_bytes=BLOCK_BYTES,
    running=4,
    step_tokens=16,
    swap_bytes=6 * BLOCK_BYTES,
)


def step_s(step: ScheduledStep) -> float:
    moved = step.swapped_out_bytes + step.swapped_in_bytes
    return 0.05 + 0.01 * sum(share.tokens for share in step.shares) + 1e-4 * moved


# Up to 6 tokens are computed again sooner than swapped.
COSTS = Costs(
    swap_s=lambda tokens: 0.05 + tokens / 400,
    recompute_s=lambda tokens: tokens / 100,
    step_s=step_s,
)


@st.composite
def workloads(draw: st.DrawFn) -> list[SimulatedRequest]:
    """Requests that the memory of ``LIMITS`` can hold, one at a time."""
    most = LIMITS.blocks * BLOCK_TOKENS
    found = []
    for number in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, most - 1))
        max_tokens = draw(st.integers(1, most - prompt))
        arrived_s = draw(st.floats(0, 4))
        found.append(
            SimulatedRequest(
                name=str(number),
                arrived_s=arrived_s,
                prompt_tokens=prompt,
                output_tokens=draw(st.integers(1, max_tokens)),
                max_tokens=max_tokens,
                deadline_s=draw(st.none() | st.floats(arrived_s, arrived_s + 10)),
            )
        )
    return found


policies = st.builds(
    Policies,
    queue=st.sampled_from(list(QUEUE_ORDERS.own)),
    preemption=st.sampled_from(list(PREEMPTIONS)),
    chunked_recompute=st.booleans(),
    peak_admission=st.booleans(),
)
limits = st.builds(
    lambda running, step_tokens, swap, spare: replace(
        LIMITS,
        running=running,
        step_tokens=step_tokens,
        swap_bytes=swap * BLOCK_BYTES,
        spare_blocks=spare,
    ),
    st.integers(1, 6),
    st.integers(6, 40),
    st.integers(0, 20),
    st.integers(0, 2),
)


def request(name: str, prompt: int, output: int, arrived_s: float = 0.0) -> SimulatedRequest:
    return SimulatedRequest(name, arrived_s, prompt, output, output)


def audit(
    simulation: Simulation, requests: Sequence[SimulatedRequest], limits: Limits
) -> dict[str, int]:
    """Follow the steps with an account of its own; the tokens that each request generated."""
    prompts = {one.name: one.prompt_tokens for one in requests}
    outputs = {one.name: one.output_tokens for one in requests}
    memory: dict[str, int] = {}
    swapped: dict[str, int] = {}
    generated = dict.fromkeys(prompts, 0)
    for step in simulation.steps:
        for name, mode in step.preempted.items():
            computed = memory.pop(name)
            if mode is PreemptionMode.SWAP:
                swapped[name] = computed
        assert sum(map(limits.blocks_for, swapped.values())) * BLOCK_BYTES <= limits.swap_bytes
        assert sum(share.tokens for share in step.shares) <= limits.step_tokens
        for share in step.shares:
            before = memory.get(share.name, swapped.pop(share.name, 0))
            assert share.computed == before
            memory[share.name] = before + share.tokens
        assert len(memory) <= limits.running
        assert sum(map(limits.blocks_for, memory.values())) <= limits.blocks
        for share in step.shares:
            whole = prompts[share.name] + generated[share.name]
            assert memory[share.name] <= whole
            generated[share.name] += memory[share.name] == whole
            if generated[share.name] == outputs[share.name]:
                del memory[share.name]
    assert not memory
    assert not swapped
    return generated


def test_the_last_that_runs_leaves_and_is_computed_again_before_newer_ones() -> None:
    requests = [request("a", 8, 4), request("b", 8, 3), request("c", 4, 1, arrived_s=0.1)]
    limits = replace(LIMITS, blocks=5, running=2)
    simulation = simulate(requests, limits, Policies(), replace(COSTS, step_s=lambda step: 1.0))
    assert [step.shares for step in simulation.steps] == [
        [StepShare("a", 0, 8), StepShare("b", 0, 8)],
        # Of five blocks, b had two and gets no third.
        [StepShare("a", 8, 1)],
        [StepShare("a", 9, 1)],
        [StepShare("a", 10, 1)],
        [StepShare("b", 0, 9), StepShare("c", 0, 4)],
        [StepShare("b", 9, 1)],
    ]
    recomputed = {"b": PreemptionMode.RECOMPUTE}
    assert [step.preempted for step in simulation.steps[:3]] == [{}, recomputed, {}]
    assert simulation.steps[4].resumed == recomputed
    b = simulation.times["b"]
    assert (b.arrived_s, b.started_s, b.finished_s) == (0.0, 0.0, 6.0)
    assert simulation.times["c"].weighted_turnaround == pytest.approx(4.9 / 1.0)


def test_what_was_swapped_goes_on_where_it_was() -> None:
    requests = [request("a", 8, 4), request("b", 8, 3)]
    limits = replace(LIMITS, blocks=5, swap_bytes=2 * BLOCK_BYTES)
    steps = simulate(requests, limits, Policies(preemption="adaptive"), COSTS).steps
    assert steps[1].preempted == {"b": PreemptionMode.SWAP}
    assert (steps[1].swapped_out_bytes, steps[4].swapped_in_bytes) == (2 * BLOCK_BYTES,) * 2
    assert steps[4].shares == [StepShare("b", 8, 1)]


def test_prompts_longer_than_a_step_are_computed_in_pieces_beside_decodes() -> None:
    requests = [request("a", 4, 4), request("b", 20, 1, arrived_s=0.01)]
    steps = simulate(requests, replace(LIMITS, step_tokens=8), Policies(), COSTS).steps
    assert [step.shares for step in steps[1:4]] == [
        [StepShare("a", 4, 1), StepShare("b", 0, 7)],
        [StepShare("a", 5, 1), StepShare("b", 7, 7)],
        [StepShare("a", 6, 1), StepShare("b", 14, 6)],
    ]


def test_blocks_are_spared_only_beside_others() -> None:
    requests = [request("a", 36, 2), request("b", 4, 1, arrived_s=0.01)]
    limits = replace(LIMITS, step_tokens=64, spare_blocks=3)
    steps = simulate(requests, limits, Policies(), COSTS).steps
    assert [[share.name for share in step.shares] for step in steps] == [["a"], ["a"], ["b"]]


def test_a_request_that_memory_can_never_hold_is_refused() -> None:
    simulate([request("a", 40, 8)], LIMITS, Policies(), COSTS)
    with pytest.raises(ValueError, match="a does not fit into 12 blocks"):
        simulate([request("a", 40, 9)], LIMITS, Policies(), COSTS)


@given(workloads(), limits, policies)
def test_every_request_gets_all_its_tokens_within_blocks_places_and_swap_space(
    requests: list[SimulatedRequest], limits: Limits, policies: Policies
) -> None:
    simulation = simulate(requests, limits, policies, COSTS)
    assert audit(simulation, requests, limits) == {one.name: one.output_tokens for one in requests}
    assert simulation.times.keys() == {one.name for one in requests}
    for one in simulation.times.values():
        assert one.arrived_s <= one.started_s < one.finished_s


@given(workloads(), limits, policies)
def test_the_same_times_give_the_same_steps_again(
    requests: list[SimulatedRequest], limits: Limits, policies: Policies
) -> None:
    simulation = simulate(requests, limits, policies, COSTS)
    last = max(one.finished_s for one in simulation.times.values())
    times = [*(step.start_s for step in simulation.steps), last]
    again = replay(requests, times, limits, policies, COSTS)
    assert again.steps == simulation.steps


@given(workloads(), limits, policies)
def test_without_chunks_no_step_computes_prompts_beside_decodes(
    requests: list[SimulatedRequest], limits: Limits, policies: Policies
) -> None:
    policies = replace(policies, chunked_recompute=False)
    prompts = {one.name: one.prompt_tokens for one in requests}
    for step in simulate(requests, limits, policies, COSTS).steps:
        fresh = [
            share
            for share in step.shares
            if share.computed == 0 or share.computed < prompts[share.name]
        ]
        assert len(fresh) in (0, len(step.shares))


@given(workloads(), limits)
def test_first_come_is_first_started(requests: list[SimulatedRequest], limits: Limits) -> None:
    times = simulate(requests, limits, Policies("fcfs"), COSTS).times
    by_arrival = sorted(requests, key=lambda one: one.arrived_s)
    started = [times[one.name].started_s for one in by_arrival]
    assert started == sorted(started)


@given(workloads(), st.sampled_from(list(QUEUE_ORDERS.own)), st.integers(0, 6))
def test_adaptive_swaps_what_is_dearer_to_compute_while_there_is_room(
    requests: list[SimulatedRequest], queue: str, swap_blocks: int
) -> None:
    limits = replace(LIMITS, swap_bytes=swap_blocks * BLOCK_BYTES)
    computed: dict[str, int] = {}
    free = limits.swap_bytes
    sizes: dict[str, int] = {}
    for step in simulate(requests, limits, Policies(queue, "adaptive"), COSTS).steps:
        for name, mode in step.preempted.items():
            size = limits.blocks_for(computed[name]) * BLOCK_BYTES
            cheaper = COSTS.swap_s(computed[name]) < COSTS.recompute_s(computed[name])
            assert mode is (
                PreemptionMode.SWAP if cheaper and size <= free else PreemptionMode.RECOMPUTE
            )
            if mode is PreemptionMode.SWAP:
                sizes[name] = size
                free -= size
        for name in step.resumed:
            free += sizes.pop(name, 0)
        computed |= {share.name: share.computed + share.tokens for share in step.shares}


@given(workloads(), st.sampled_from(list(QUEUE_ORDERS.own)))
def test_nothing_is_computed_twice_if_swap_space_has_room_for_all(
    requests: list[SimulatedRequest], queue: str
) -> None:
    limits = replace(LIMITS, swap_bytes=len(requests) * LIMITS.blocks * BLOCK_BYTES)
    steps = simulate(requests, limits, Policies(queue, "swap"), COSTS).steps
    computed = sum(share.tokens for step in steps for share in step.shares)
    assert computed == sum(one.prompt_tokens + one.output_tokens - 1 for one in requests)


def beside_short_ones(queue: str, prompt: int, short: int, every_s: float) -> tuple[float, float]:
    """How long a long prompt waits amid an unending stream of short ones, and the bound.

    Once the long one's priority, its waiting over its tokens, exceeds what any short one reaches,
    none of them starts before it, and those that run end within their time.
    """
    stream = [request(f"short {at}", short, 8, at * every_s) for at in range(int(60 / every_s))]
    waits = request("long", prompt, 4, arrived_s=5.0)
    costs = replace(COSTS, step_s=lambda step: 0.1)
    times = simulate([*stream, waits], LIMITS, Policies(queue), costs).times
    started_s = times.pop("long").started_s
    slowest = max(
        min(one.finished_s, started_s) - one.arrived_s
        for one in times.values()
        if one.arrived_s < started_s
    )
    return started_s - 5.0, slowest * (1 + prompt / short)


@given(st.integers(10, 44), st.integers(1, 8), st.floats(0.2, 1.0))
def test_fairness_bounds_a_long_ones_wait_by_that_of_short_ones(
    prompt: int, short: int, every_s: float
) -> None:
    waited_s, bound_s = beside_short_ones("fair", prompt, short, every_s)
    assert waited_s <= bound_s


def test_shortest_job_first_starves_a_long_one() -> None:
    waited_s, bound_s = beside_short_ones("sjf", 40, 4, 0.3)
    assert waited_s > 50 > 3 * bound_s

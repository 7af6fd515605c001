"""Where prompts are computed, and which replica answers them."""

from __future__ import annotations

import pytest

from loomserve.platform.disaggregation.policy.prompts import (
    PromptPlace,
    PromptView,
    prefill_replicas,
    prompt_place,
    takes_over,
)
from loomserve.platform.state.roles import Role

LONG = PromptView(tokens=129, shareable=True)


@pytest.mark.parametrize(
    ("prompt", "answers", "prefill", "expected"),
    [
        (LONG, Role.DECODE, {"p"}, PromptPlace.PREFILL),
        (LONG, Role.DECODE, set(), PromptPlace.PREFILL_AWAY),
        (PromptView(128, shareable=True), Role.DECODE, {"p"}, PromptPlace.LOCAL),
        (PromptView(5000, shareable=False), Role.DECODE, {"p"}, PromptPlace.LOCAL),
        (PromptView(128, shareable=True), Role.DECODE, set(), PromptPlace.LOCAL),
        (LONG, Role.UNIFIED, {"p"}, None),
        # It was chosen because no other is there.
        (LONG, Role.PREFILL, {"p"}, None),
    ],
)
def test_only_decode_replicas_have_long_prompts_computed_elsewhere(
    prompt: PromptView, answers: Role, prefill: set[str], expected: PromptPlace | None
) -> None:
    assert prompt_place(prompt, answers, prefill, local_prompt_tokens=128) is expected


def test_prefill_replicas_are_those_that_take_requests_now() -> None:
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "u": Role.UNIFIED}
    assert prefill_replicas({"p", "d", "u"}, roles.__getitem__, "d") == {"p"}
    assert prefill_replicas({"p", "q"}, roles.__getitem__, "p") == {"q"}


@pytest.mark.parametrize("role", Role)
def test_a_replica_that_was_chosen_answers_unless_it_has_become_a_prefill_replica(
    role: Role,
) -> None:
    assert takes_over("d", {"d", "p"}, lambda _: role) == (role is not Role.PREFILL)
    assert not takes_over("d", {"p"}, lambda _: role)

"""Prompts that a prefill replica computes before the request goes to the replica that answers it.

The prefill replica generates one token and leaves the prompt's KV in the store. The answering
replica, chosen and booked before, goes on after that token as after any other replica's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set

from vllm.v1.engine import EngineCoreOutput, FinishReason

from loomserve.platform.config import LOCAL_PROMPT_TOKENS
from loomserve.platform.disaggregation.engine.handoff import shareable
from loomserve.platform.disaggregation.metrics import HandoffMetrics
from loomserve.platform.disaggregation.policy.prompts import (
    PromptPlace,
    PromptView,
    RoleOf,
    prefill_replicas,
    prompt_place,
    takes_over,
)
from loomserve.platform.front_end.engine.open_requests import (
    ChosenReplica,
    OpenRequest,
    prompt_length,
)
from loomserve.platform.front_end.routing import Choose
from loomserve.platform.state.roles import Role

_log = logging.getLogger(__name__)


class Handoffs:
    """Who computes the prompts of one model's requests, and the metrics of hand-offs."""

    def __init__(
        self,
        role_of: RoleOf = lambda _: Role.UNIFIED,
        local_prompt_tokens: int = LOCAL_PROMPT_TOKENS,
    ) -> None:
        """A prompt of at most ``local_prompt_tokens`` is computed where it is answered."""
        self.metrics_of: Callable[[str], HandoffMetrics | None] = lambda _: None
        """A replica's metrics, by its id; None: it is not known any more."""
        self._role_of = role_of
        self._local_prompt_tokens = local_prompt_tokens

    def place(
        self, one: OpenRequest, chosen: str, usable: Set[str], choose: Choose
    ) -> tuple[PromptPlace | None, ChosenReplica | None]:
        """Where the prompt of a request is computed, and by which prefill replica, if by one.
        ``chosen`` is to answer it, ``usable`` take requests, ``choose`` chooses among prefill
        replicas."""
        if one.attempt:
            return None, None  # it goes on elsewhere, and that is a matter of its own
        prefill = prefill_replicas(usable, self._role_of, chosen)
        prompt = PromptView(prompt_length(one.request), shareable(one.request))
        role = self._role_of(chosen)
        place = prompt_place(prompt, role, prefill, self._local_prompt_tokens)
        if place is not PromptPlace.PREFILL:
            return place, None
        routing = one.route_prompt(prefill)
        try:
            computes = choose(routing)
        except Exception:  # a prompt can be computed without
            _log.exception("no prefill replica could be chosen for request %s", one.id)
            computes = None
        if computes is None:
            return PromptPlace.PREFILL_AWAY, None
        return place, ChosenReplica(computes, routing)

    def takes_over(self, chosen: str, usable: Set[str]) -> bool:
        """Whether a replica still answers a request that it was chosen for."""
        return takes_over(chosen, usable, self._role_of)

    def placed(self, replica_id: str, place: PromptPlace) -> None:
        if (metrics := self.metrics_of(replica_id)) is not None:
            metrics.prompt(place)

    def observe(
        self, replica_id: str, one: OpenRequest, output: EngineCoreOutput, now: float
    ) -> None:
        """Take the figures of a hand-off from the first output of the replica that goes on."""
        since, one.handed_over_at = one.handed_over_at, None
        metrics = self.metrics_of(replica_id)
        if metrics is None or since is None:
            return
        metrics.went_on(now - since)
        if (told := output.prefill_stats) is not None:
            metrics.prompt_tokens(told.num_cached_tokens, told.num_computed_tokens)


def only_first(one: OpenRequest, output: EngineCoreOutput, max_model_len: int) -> bool:
    """Whether an output ended only for the prefill replica, which was asked for a single token."""
    return output.finish_reason is FinishReason.LENGTH and one.ending(max_model_len) is None

"""Where the prompt of a request is computed, once a replica has been chosen for its answer.

A decode replica has it computed by a prefill replica, and goes on after the first token. A role
says what is sent to a replica, not what it can do, so whatever is missing, the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import StrEnum

from loomserve.platform.state.roles import Role

RoleOf = Callable[[str], Role]
"""The role of a replica, by its id."""


class PromptPlace(StrEnum):
    """What a prefill replica does for a request of a decode replica."""

    PREFILL = "continued"
    """It computes the prompt and the first token."""
    LOCAL = "local"
    """Nothing: the prompt is short, or another engine's work on it could not be used."""
    PREFILL_AWAY = "prefill_away"
    """Nothing: none is there, or it ended before it had the first token."""


@dataclass(frozen=True)
class PromptView:
    """The prompt of a request that has been computed nowhere yet."""

    tokens: int
    shareable: bool
    """Whether its answer is the same if another engine computes it."""


def prompt_place(
    prompt: PromptView, answers: Role, prefill: Set[str], local_prompt_tokens: int
) -> PromptPlace | None:
    """Where a prompt is computed; None: by a replica that is not there for answers alone.
    ``answers`` is the role of the replica that was chosen for the answer, and ``prefill`` are
    others that could compute a prompt of more than ``local_prompt_tokens``."""
    if answers is not Role.DECODE:
        return None
    if prompt.tokens <= local_prompt_tokens or not prompt.shareable:
        return PromptPlace.LOCAL
    return PromptPlace.PREFILL if prefill else PromptPlace.PREFILL_AWAY


def prefill_replicas(usable: Set[str], role_of: RoleOf, chosen: str) -> frozenset[str]:
    """Those that compute prompts for the chosen replica."""
    return frozenset(each for each in usable if each != chosen and role_of(each) is Role.PREFILL)


def takes_over(chosen: str, usable: Set[str], role_of: RoleOf) -> bool:
    """Whether the replica that was chosen before the prompt was computed still gives the answer.
    Another is chosen in the place of one that has gone, or that has become a prefill replica."""
    return chosen in usable and role_of(chosen) is not Role.PREFILL

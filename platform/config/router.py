"""The section ``models[].router``."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from loomserve.platform.config.base import FieldError, Section

_GROUP = "loomserve.routing_policies"
_OWN = {
    "load_aware": "loomserve.routers.policies.load_aware:LoadAware",
    "round_robin": "loomserve.routers.policies.round_robin:RoundRobin",
    "power_of_two": "loomserve.routers.policies.power_of_two:PowerOfTwo",
    "prefix_aware": "loomserve.routers.policies.prefix_aware:PrefixAware",
}
POLICIES = {name: EntryPoint(name, at, _GROUP) for name, at in _OWN.items()}
"""Routing policies by name: the platform's own, and those that installed packages bring."""
for _brought in entry_points(group=_GROUP):
    POLICIES.setdefault(_brought.name, _brought)

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]


def policy_class(name: str) -> Any:
    """The :class:`~loomserve.routers.policy.RoutingPolicy`; ValueError: it cannot be used."""
    try:
        policy = POLICIES[name].load()
    except Exception as error:  # whatever the import of a user's package raises
        raise ValueError(f"routing policy {name!r} cannot be imported: {error}") from error
    options = getattr(policy, "Options", None)
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise ValueError(
            f"routing policy {name!r} is no routing policy: {POLICIES[name].value} is to name a "
            "subclass of loomserve.routers.policy.RoutingPolicy"
        )
    return policy


class Router(Section):
    """How requests are spread over the replicas of a model."""

    policy: PolicyName = Field(
        "load_aware",
        description="load_aware: BanaServe's algorithm 4-2 on measured loads; prefix_aware: loads, "
        "and where the prompt's beginning was sent before.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Those of a policy that a package brings."
    )
    load_limit: float = Field(
        1.6,
        gt=0,
        le=2,
        description="δ_L: a replica whose utilisation (0 to 2) is below this takes the request.",
    )
    stale_after_s: float = Field(
        10.0, gt=0, description="A load report older than this counts as unknown."
    )

    @model_validator(mode="after")
    def _policy_takes_the_options(self) -> Router:
        try:
            if self.options or self.policy not in _OWN:
                policy_class(self.policy).Options.model_validate(self.options)
        except ValidationError as error:
            first = error.errors()[0]
            raise FieldError(first["msg"], "options", *first["loc"]) from None
        except ValueError as error:
            raise FieldError(str(error), "policy") from None
        return self

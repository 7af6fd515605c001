"""Lending options of an engine: one dictionary in vLLM's ``additional_config``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from typing_extensions import TypedDict

from loomserve.platform.base.frozen import Frozen

LENDING_CONFIG = "loomserve_lending"
"""The key of ``additional_config`` under which an engine finds its :class:`LendingOptions`."""


class ShardSpec(TypedDict, total=False):
    """The last KV heads of each layer, or the decoder layers from the first to before the second
    number, that a lender computes: one of both keys."""

    heads: int
    layers: list[int]


class LendingOptions(Frozen):
    """Lending options; all bytes are of the engine's own KV."""

    borrow_bytes: int = Field(0, ge=0, description="Most bytes that it keeps with lenders.")
    lenders: int = Field(1, ge=1, description="Most lenders at a time.")
    placement: Literal["adaptive", "ratio", "local"] = "adaptive"
    lent_share: float = Field(0.5, ge=0, le=1, description="Share lent, with placement: ratio.")
    patience_ms: float = Field(100, gt=0)
    """A lender that takes longer for a layer is given up."""
    move: bool = True
    """True: running requests change their partition, their KV copied, before they are preempted."""
    lend_bytes: int = Field(0, ge=0, description="Most bytes that it lends to others.")
    tpot_budget: float = Field(1.15, gt=1)
    """Most that a lender's p99 step time may be of that without borrowers."""
    gpu_form: Literal["stream", "resident"] = "stream"
    """How a lender on a GPU serves tasks: by a thread with a stream of its own, or by a kernel that
    stays."""
    polling: Literal["steps", "operators", "slices"] = "slices"
    """Where a lender looks for tasks while it computes: nowhere within a step, between operators,
    or between slices of those that take long, too."""

"""Batches by deadlines and output lengths: SLO-ODBS (UELLM, section 3.4, algorithm 3-1).

The configuration chooses it (``batch.offline_models[].batching``); by itself the platform takes S³.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from loomserve.routers.static_batching.base import (
    BatchingPolicy,
    BatchRequest,
    FormingBatch,
    KvBudget,
    StaticBatch,
)

# The deadline of a request that names none, after its arrival; engines' queues take the same.
_PATIENCE_S = 600.0


class OutputTerm(StrEnum):
    """How line 6 of the algorithm joins a request's length with the batch's longest."""

    DIFFERENCE = "difference"
    SUM = "sum"


class _ByDeadline(BatchingPolicy):
    """Takes requests by deadline, and ends a batch before it costs too much.

    With a request q and a batch of n requests, of which the latest deadline is L_CM seconds ahead
    and the longest answer has O_CM tokens, the cost of q's joining is
    ``slo_weight * (SLO(q) + L_CM) * (n + 1) + output_weight * (G'(q) ± O_CM) * (n + 1)``. It joins
    while that is at most ``threshold`` and memory holds; else the batch ends and q begins the next.

    * The paper's weights w1, w2 and its coefficients L1, L2 stand only in the products w1·L1 and
      w2·L2: these are the two weights here.
    * Line 6 of the algorithm subtracts the longest answer where equation 3-4 adds it. The
      difference bounds by how much a request lengthens its batch; the sum bounds a batch's padded
      tokens, as memory does. At the load that vanilla batches carry the sum meets more deadlines
      (docs/static_batching.md), so it is the default.
    * Line 20, "adjust the size by CM", is not spelt out; memory bounds a batch's size.
    * SLO(q) is the time that is left until its deadline. A deadline that is missed counts as one
      that was not set: serving it first would only make others late.
    """

    suits = "deadline"

    def form(
        self, requests: Sequence[BatchRequest], memory: KvBudget, now: float
    ) -> list[StaticBatch]:
        batches: list[FormingBatch] = []
        latest = 0.0
        for request in sorted(requests, key=lambda one: (_deadline(one, now), one.id)):
            left_s = max(0.0, _deadline(request, now) - now)
            last = batches[-1] if batches else None
            if (
                last is not None
                and self._cost(left_s, latest, request, last) <= self.options.threshold
                and last.holds(request, memory)
            ):
                last.add(request)
                latest = max(latest, left_s)
            else:
                batches.append(FormingBatch(request))
                latest = left_s
        return [one.formed() for one in batches]

    def _cost(
        self, left_s: float, latest: float, request: BatchRequest, batch: FormingBatch
    ) -> float:
        options = self.options
        outputs = request.predicted_tokens + batch.generation
        if options.output_term is OutputTerm.DIFFERENCE:
            outputs = request.predicted_tokens - batch.generation
        deadlines = options.slo_weight * (left_s + latest)
        joined = len(batch.requests) + 1
        return float(joined * (deadlines + options.output_weight * outputs))


class SloOdbs(_ByDeadline):
    class Options(BatchingPolicy.Options):
        threshold: float = Field(ge=0)
        slo_weight: float = Field(ge=0)
        output_weight: float = Field(ge=0)
        output_term: OutputTerm = OutputTerm.SUM


class SloDbs(_ByDeadline):
    """SLO-DBS (w1 = 0): batches end by output lengths alone, in the order of deadlines."""

    class Options(BatchingPolicy.Options):
        threshold: float = Field(ge=0)
        slo_weight: ClassVar[float] = 0.0
        output_weight: float = Field(ge=0)
        output_term: OutputTerm = OutputTerm.SUM


class Odbs(_ByDeadline):
    """ODBS (w2 = 0): batches end by T_l alone. T_l has deadlines in it and no length, although the
    paper calls ODBS driven by output lengths."""

    class Options(BatchingPolicy.Options):
        threshold: float = Field(ge=0)
        slo_weight: float = Field(ge=0)
        output_weight: ClassVar[float] = 0.0
        output_term: ClassVar[OutputTerm] = OutputTerm.SUM


def _deadline(request: BatchRequest, now: float) -> float:
    if request.deadline_s is not None and request.deadline_s > now:
        return request.deadline_s
    return request.arrived_s + _PATIENCE_S

"""The section ``models[].lending``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from loomserve.platform.config.base import Bytes, FieldError, ModelName, Section


class Lending(Section):
    """Attention of hot models on cold models' engines, in whose memory their KV lies (Weaver).

    A short form is read too: ``lending: auto``.
    """

    auto: bool = Field(
        False,
        description="Lend to and borrow from any model that does so too, one at a time: who is hot "
        "borrows from who is cold, as traffic has it. The memories below are then kv_cache_memory. "
        "Models without devices do so where they can.",
    )

    lend_memory: Bytes | None = Field(
        None,
        description="Of a cold model: the most of a replica's KV memory that it lends while its "
        "own requests do not need it; null: it lends none. With borrow_memory: its replicas have "
        "heads or layers of one another, as prefill and decode may want it.",
    )
    borrow_memory: Bytes | None = Field(
        None,
        description="Of a hot model: the most KV that a replica may have with its lenders, beside "
        "its own kv_cache_memory; null: it borrows none.",
    )
    lenders: tuple[ModelName, ...] = Field(
        (), description="The models that it may borrow from; none named means all that lend."
    )
    placement: Literal["adaptive", "ratio", "local"] = Field(
        "adaptive",
        description="Where its requests start. adaptive: by free memory and predicted attention "
        "time; ratio: a fixed share with lenders, as in the paper; local: none with lenders.",
    )
    lent_share: float = Field(
        0.5, ge=0, le=1, description="With placement ratio: the share that starts with lenders."
    )
    patience_ms: float = Field(
        100.0, gt=0, description="A lender that takes longer for one layer is given up."
    )
    tpot_budget: float = Field(
        1.15,
        gt=1,
        description="Of a lender: its p99 time per output token may be at most so many times "
        "the undisturbed one.",
    )
    experimental: bool = Field(
        False,
        description="Lend between GPUs, too, where it has not shown a gain yet; cores need no such "
        "word.",
    )

    @model_validator(mode="after")
    def _lends_or_borrows(self) -> Lending:
        if self.auto:
            for field in ("lend_memory", "borrow_memory", "lenders"):
                if getattr(self, field):
                    raise FieldError("is of no use with auto, which finds its pairs", field)
            return self
        if self.borrow_memory is None:
            if self.lenders:
                raise FieldError("are of no use without borrow_memory", "lenders")
            if self.lend_memory is None:
                raise ValueError(
                    "give it lend_memory or borrow_memory, or leave it out: so it does neither"
                )
        elif self.lend_memory is not None and self.lenders:
            raise FieldError(
                "are of no use with both borrow_memory and lend_memory: replicas then lend to one "
                "another, and to no other model's",
                "lenders",
            )
        return self

    @property
    def among_replicas(self) -> bool:
        """Whether replicas of the model lend to one another, and to nobody else."""
        return self.lend_memory is not None and self.borrow_memory is not None

    @property
    def lends_to_others(self) -> bool:
        """Whether other models may borrow from this one."""
        return self.lend_memory is not None and not self.among_replicas

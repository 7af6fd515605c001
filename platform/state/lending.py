"""State of loans, as both ends see them."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.state.base import StateModel
from loomserve.platform.state.lending_options import ShardSpec


class ShardState(StateModel):
    """Shard of a replica: heads or layers that a lender computes for all its requests."""

    heads: int = Field(0, description="KV heads of each layer that move.")
    layers: tuple[int, int] | None = Field(
        None, description="Layers that move: the first, and the one behind the last."
    )
    phase: str = Field(
        description="leaving: copied while steps compute it here; away; returning: copied back; "
        "home."
    )
    pause_s: float = Field(description="Longest time that steps stood still for it.")
    copied_bytes: int
    why: str = Field("", description="Reason for which it comes home, if it does.")

    @property
    def is_away(self) -> bool:
        return self.phase in ("away", "returning")


class LoanState(StateModel):
    """A loan, as the borrower measured it; blocks are the borrower's."""

    name: str
    borrower: str
    borrower_replica: str
    lender: str
    lender_replica: str
    draining: bool = Field(description="True: no request starts there any more.")
    phase: str = Field(
        description="open; stopped: no request starts there, for it is slow; eject: those there "
        "are computed elsewhere; probing: a few start there again."
    )
    most_tokens: int = Field(description="Tokens of context that the borrower keeps there at most.")
    age_s: float
    usable_blocks: int = Field(description="Blocks that the lender grants at this moment.")
    free_blocks: int
    requests: int = Field(description="Running requests whose KV is there.")
    tasks: int = Field(description="Tasks that the lender computed: attention of a layer.")
    wait_mean_us: float = Field(description="Mean wait for the result of a task.")
    wait_max_us: float
    wait_share: float = Field(description="Share of the loan's time that the borrower waited.")
    service_share: float = Field(description="Share of the loan's time that the lender computed.")
    shard: ShardState | None = Field(None, description="None where the KV of whole requests lies.")


class BorrowingState(StateModel):
    """All loans of a borrower's replica."""

    own_blocks: int = Field(description="KV blocks in its own memory.")
    own_free_blocks: int
    loans: tuple[LoanState, ...]
    broken: dict[str, int] = Field(description="Loans that ended by themselves, by reason.")
    moved: int = Field(0, description="Running requests whose KV was copied to another partition.")
    problems: dict[str, str] = Field(
        description="Why the last attempt failed, by the model of each lender without a loan."
    )
    switched_off: tuple[str, ...] = Field(
        description="Lenders' models that an operator switched off."
    )
    limits: dict[str, int] = Field(
        {}, description="Most bytes of KV that a plan allows, by the lender's model."
    )
    shards: dict[str, ShardSpec] = Field(
        {}, description="Shards that a plan has moved, by the lender's model."
    )


class SlicingState(StateModel):
    """Slices of a lender's operators in one kind of step, between which it computes tasks."""

    slices: dict[str, int] = Field(description="Slices of each operator that has more than one.")
    wait_whole_us: float = Field(description="Predicted mean wait of a task without slices.")
    wait_us: float = Field(description="Predicted mean wait of a task.")


class LentState(StateModel):
    """A loan, as the lender measured it; blocks are the lender's."""

    name: str = Field(description="The loan's name.")
    lender: str
    lender_replica: str
    borrower: str
    blocks: int = Field(description="Blocks that the borrower has at this moment.")
    most_blocks: int = Field(description="Blocks that the borrower may come to have.")
    taken_back_blocks: int = Field(description="Blocks that the lender's own requests took back.")
    tasks: int = Field(0, description="Tasks computed for the borrower: attention of a layer.")
    wait_us: float = Field(0.0, description="Measured mean time until a task is begun.")
    service_us: float = Field(0.0, description="Measured mean time that a task takes.")
    slicing: dict[str, SlicingState] = Field(
        default_factory=dict, description="By kind of step: decode, prefill."
    )


class LendingModelState(StateModel):
    """Limits that the configuration sets for a model that lends or borrows, in bytes a replica."""

    model: str
    lend_memory: int | None
    borrow_memory: int | None
    tpot_budget: float | None = Field(
        description="Most that a lender's p99 TPOT may be, as a multiple of the undisturbed one."
    )


class LendingPairState(StateModel):
    """A model and another from which it may borrow."""

    borrower: str
    lender: str
    enabled: bool = Field(description="False: an operator switched the pair off.")
    problem: str | None = Field(description="Why a replica has no loan, by its last attempt.")
    limits: dict[str, int] = Field(
        default_factory=dict,
        description="Most bytes of KV that a plan allows the borrower's replicas, by device.",
    )


class LendingState(StateModel):
    """Lending: behind ``GET /admin/v1/lending`` and ``loomserve admin lending``."""

    models: tuple[LendingModelState, ...]
    pairs: tuple[LendingPairState, ...]
    loans: tuple[LoanState, ...]
    lent: tuple[LentState, ...]

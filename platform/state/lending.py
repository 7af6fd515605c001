"""Loans, as both ends see them: behind ``GET /admin/v1/lending``."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.state.base import StateModel


class ShardState(StateModel):
    """Heads or layers of a replica that a lender computes for all its requests."""

    heads: int = Field(0, description="KV heads of every layer that move.")
    layers: tuple[int, int] | None = Field(
        None, description="Layers that move: first, behind last."
    )
    phase: str = Field(
        description="leaving: copied while steps compute it here; away; returning: copied back; "
        "home."
    )
    pause_s: float = Field(description="The longest that steps stood still for it.")
    copied_bytes: int
    why: str = Field("", description="It comes home, once it does.")

    @property
    def is_away(self) -> bool:
        return self.phase in ("away", "returning")


class LoanState(StateModel):
    """What a replica keeps with a lender, as the borrower measured it; blocks are its own."""

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
    most_tokens: int = Field(description="Of context that the borrower lets lie there.")
    age_s: float
    usable_blocks: int = Field(description="What the lender grants at this moment.")
    free_blocks: int
    requests: int = Field(description="Running requests whose KV is there.")
    tasks: int = Field(description="Layers' attention that the lender computed.")
    wait_mean_us: float = Field(description="Waits for the lender's results, a task.")
    wait_max_us: float
    wait_share: float = Field(description="Share of the loan's time that the borrower waited.")
    service_share: float = Field(description="Share of it that the lender computed for it.")
    shard: ShardState | None = Field(None, description="None where whole requests lie.")


class BorrowingState(StateModel):
    """What a replica of a hot model borrows."""

    own_blocks: int = Field(description="KV blocks in its own memory.")
    own_free_blocks: int
    loans: tuple[LoanState, ...]
    broken: dict[str, int] = Field(description="Loans that ended by themselves, by reason.")
    moved: int = Field(0, description="Running requests whose KV was copied to another side.")
    problems: dict[str, str] = Field(
        description="Of each lender without a loan: why the last attempt failed."
    )
    switched_off: tuple[str, ...] = Field(description="Lenders that an operator switched off.")
    limits: dict[str, int] = Field(
        {}, description="Bytes of KV that a plan lets it have, at most, by the lender's model."
    )
    shards: dict[str, dict[str, int | list[int]]] = Field(
        {}, description="Heads or layers that a plan gives a lender's model to compute."
    )


class SlicingState(StateModel):
    """How a lender's operators are cut in one kind of step, so that guests' tasks wait little."""

    slices: dict[str, int] = Field(description="By operator, where there is more than one.")
    wait_whole_us: float = Field(description="Predicted mean wait of a task were none cut.")
    wait_us: float = Field(description="Predicted mean wait of a task.")


class LentState(StateModel):
    """What a replica of a cold model lends to one borrower; blocks are the lender's own."""

    name: str = Field(description="The loan's.")
    lender: str
    lender_replica: str
    borrower: str
    blocks: int = Field(description="What the borrower has at this moment.")
    most_blocks: int = Field(description="What it may come to have.")
    taken_back_blocks: int = Field(description="What the lender's own requests have taken back.")
    tasks: int = Field(0, description="Layers' attention computed for the borrower.")
    wait_us: float = Field(0.0, description="Measured mean wait of a task until it was begun.")
    service_us: float = Field(0.0, description="Measured mean time that a task itself took.")
    slicing: dict[str, SlicingState] = Field(
        default_factory=dict, description="For steps that decode, and for those that prefill."
    )


class LendingModelState(StateModel):
    """What the configuration allows a model that lends or borrows; bytes of each replica."""

    model: str
    lend_memory: int | None
    borrow_memory: int | None
    tpot_budget: float | None = Field(
        description="Of a lender: its p99 time per output token over the undisturbed one, at most."
    )


class LendingPairState(StateModel):
    """A borrower and a lender that it may borrow from."""

    borrower: str
    lender: str
    enabled: bool = Field(description="False: an operator switched the pair off.")
    problem: str | None = Field(description="Why a replica has no loan: the last attempt's.")
    limits: dict[str, int] = Field(
        default_factory=dict,
        description="Bytes of KV that a plan lets the borrower's replicas have, by device.",
    )


class LendingState(StateModel):
    """Who lends to whom: behind ``GET /admin/v1/lending`` and ``loomserve admin lending``."""

    models: tuple[LendingModelState, ...]
    pairs: tuple[LendingPairState, ...]
    loans: tuple[LoanState, ...]
    lent: tuple[LentState, ...]

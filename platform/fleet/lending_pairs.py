"""Which models may borrow from which, and what that means for their engines."""

from __future__ import annotations

from collections.abc import Iterable

from loomserve.platform.config import Model
from loomserve.platform.state.lending_options import LendingOptions


def lenders_of(model: Model, models: Iterable[Model]) -> tuple[str, ...]:
    """The models among ``models`` from which ``model`` may borrow; none if it borrows nothing.

    A model that lends too borrows from itself only: its replicas compute shards of one another. One
    replica lends or borrows at a time, or its borrowers would wait while it waits for its lender.
    """
    wants = model.lending
    if wants is None or wants.borrow_memory is None:
        return ()
    if wants.among_replicas:
        return (model.name,)
    lend = [m.name for m in models if m.lending is not None and m.lending.lends_to_others]
    # In the user's order, who may have put the best one first.
    return tuple(name for name in wants.lenders or lend if name in lend)


def lending_options(model: Model, models: Iterable[Model]) -> LendingOptions | None:
    """Options of an engine of ``model``; None: it neither lends nor borrows.

    One replica of each lender's model lends to a borrower's replica, so it has as many lenders as
    there are such models.
    """
    given = model.lending
    if given is None:
        return None
    return LendingOptions(
        borrow_bytes=given.borrow_memory or 0,
        lend_bytes=given.lend_memory or 0,
        lenders=max(1, len(given.lenders) or len(lenders_of(model, models))),
        placement=given.placement,
        lent_share=given.lent_share,
        patience_ms=given.patience_ms,
        tpot_budget=given.tpot_budget,
    )

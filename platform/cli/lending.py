"""``loomserve admin lending``: shows and switches loans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from loomserve.platform.cli.status import DEFAULT_URL, Token, Url, carry_out, loan_table
from loomserve.platform.cli.tables import add_row, display, new_table, stacked
from loomserve.platform.state import LendingModelState, LendingState, SlicingState

lending = typer.Typer(invoke_without_command=True, help="Loans of KV memory and attention.")

Borrower = Annotated[str, typer.Argument(help="The model that borrows.")]
Lender = Annotated[str, typer.Argument(help="The model that lends.")]


@lending.callback()
def show(context: typer.Context, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show pairs, loans and budgets."""
    if context.invoked_subcommand is None:
        state = LendingState.model_validate_json(carry_out("GET", url, token, "lending").content)
        display(render(state))


@lending.command()
def enable(borrower: Borrower, lender: Lender, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Let a model borrow from another again, without the limits that plans have set."""
    _switch(borrower, lender, True, url, token)


@lending.command()
def disable(
    borrower: Borrower, lender: Lender, url: Url = DEFAULT_URL, token: Token = None
) -> None:
    """Drain the loans of a pair and open none, also for replicas yet to come."""
    _switch(borrower, lender, False, url, token)


@lending.command()
def drain(
    name: Annotated[str, typer.Argument(help="The loan's name.")],
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """End a loan once no request is there; another may follow after a minute."""
    carry_out("POST", url, token, f"lending/loans/{name}/drain")
    typer.echo(f"{name} drains")


def render(state: LendingState) -> RenderableType:
    """The state as tables: models with their budgets, pairs, loans."""
    figures = ("lends MiB", "borrows MiB", "TPOT budget")
    models = new_table("model", numbers=figures, title="Lending and borrowing")
    for model in state.models:
        add_row(models, model.model, *_budgets(model))
    pairs = new_table("borrower", "lender", "", title="Pairs", whole=2)
    for pair in state.pairs:
        limits = (f"at most {size >> 20} MiB on {at}" for at, size in pair.limits.items())
        said = ", ".join(filter(None, (*limits, pair.problem))) if pair.enabled else "switched off"
        add_row(pairs, pair.borrower, pair.lender, said)
    return stacked(models, pairs, loan_table(state.loans), _lent(state))


def _budgets(model: LendingModelState) -> Iterable[str]:
    yield from (_mebibytes(size) for size in (model.lend_memory, model.borrow_memory))
    yield "-" if model.tpot_budget is None else f"{model.tpot_budget:.2f} x"


def _lent(state: LendingState) -> Table:
    table = new_table(
        "loan", "lender", "borrower",
        numbers=("blocks", "at most", "taken back", "wait µs", "service µs"), title="Lent memory",
    )  # fmt: skip
    table.add_column("operators sliced into (predicted wait µs, before)")
    for lent in state.lent:
        blocks = (lent.blocks, lent.most_blocks, lent.taken_back_blocks)
        times = (f"{lent.wait_us:.0f}", f"{lent.service_us:.0f}")
        cells = (*map(str, blocks), *times, ", ".join(map(_split, lent.slicing.items())))
        add_row(table, lent.name, lent.lender, lent.borrower, *cells)
    return table


def _split(of: tuple[str, SlicingState]) -> str:
    kind, split = of
    parts = " ".join(f"{name} {count}" for name, count in split.slices.items()) or "none"
    return f"{kind}: {parts} ({split.wait_us:.0f}, {split.wait_whole_us:.0f})"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


def _switch(borrower: str, lender: str, enabled: bool, url: str, token: str | None) -> None:
    path = f"lending/pairs/{borrower}/{lender}"
    carry_out("PUT", url, token, path, {"enabled": enabled})
    typer.echo(f"{borrower} {'may' if enabled else 'does not'} borrow from {lender}")

"""``loomserve admin lending``: shows and switches loans."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from loomserve.platform.cli.admin_client import AdminClient, AdminCommands
from loomserve.platform.cli.status import loan_table
from loomserve.platform.cli.tables import Figure, Row, display, fixed, mebibytes, stacked, table
from loomserve.platform.state import LendingPairState, LendingState, LentState, SlicingState

lending = AdminCommands(invoke_without_command=True, help="Loans of KV memory and attention.")

Borrower = Annotated[str, typer.Argument(help="The model that borrows.")]
Lender = Annotated[str, typer.Argument(help="The model that lends.")]


@lending.callback()
def show(platform: AdminClient, context: typer.Context) -> None:
    """Show pairs, loans and budgets."""
    if context.invoked_subcommand is None:
        display(render(platform.get("lending", LendingState)))


@lending.command()
def enable(platform: AdminClient, borrower: Borrower, lender: Lender) -> None:
    """Let a model borrow from another again, without the limits that plans have set."""
    platform.carry_out("PUT", f"lending/pairs/{borrower}/{lender}", {"enabled": True})
    typer.echo(f"{borrower} may borrow from {lender}")


@lending.command()
def disable(platform: AdminClient, borrower: Borrower, lender: Lender) -> None:
    """Drain the loans of a pair and open none, also for replicas yet to come."""
    platform.carry_out("PUT", f"lending/pairs/{borrower}/{lender}", {"enabled": False})
    typer.echo(f"{borrower} does not borrow from {lender}")


@lending.command()
def drain(
    platform: AdminClient, name: Annotated[str, typer.Argument(help="The loan's name.")]
) -> None:
    """End a loan once no request is there; another may follow after a minute."""
    platform.carry_out("POST", f"lending/loans/{name}/drain")
    typer.echo(f"{name} drains")


def render(state: LendingState) -> RenderableType:
    """The state as tables: models with their budgets, pairs, loans."""
    models: list[Row] = [
        {
            "model": model.model,
            "lends MiB": mebibytes(model.lend_memory),
            "borrows MiB": mebibytes(model.borrow_memory),
            "TPOT budget": Figure("-" if (of := model.tpot_budget) is None else f"{of:.2f} x"),
        }
        for model in state.models
    ]
    return stacked(
        table("Lending and borrowing", models) or Text("no model lends or borrows"),
        table("Pairs", map(_pair, state.pairs), whole=2),
        loan_table(state.loans),
        table("Lent memory", map(_lent, state.lent)),
    )


def _pair(pair: LendingPairState) -> Row:
    limits = (f"at most {size >> 20} MiB on {at}" for at, size in pair.limits.items())
    said = ", ".join(filter(None, (*limits, pair.problem))) if pair.enabled else "switched off"
    return {"borrower": pair.borrower, "lender": pair.lender, "": said}


def _lent(lent: LentState) -> Row:
    return {
        "loan": lent.name,
        "lender": lent.lender,
        "borrower": lent.borrower,
        "blocks": lent.blocks,
        "at most": lent.most_blocks,
        "taken back": lent.taken_back_blocks,
        "wait µs": fixed(lent.wait_us, 0),
        "service µs": fixed(lent.service_us, 0),
        "operators sliced into (predicted wait µs, before)": ", ".join(
            map(_split, lent.slicing.items())
        ),
    }


def _split(of: tuple[str, SlicingState]) -> str:
    kind, split = of
    parts = " ".join(f"{name} {count}" for name, count in split.slices.items()) or "none"
    return f"{kind}: {parts} ({split.wait_us:.0f}, {split.wait_whole_us:.0f})"

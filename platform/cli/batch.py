"""``loomserve batch``: what the batch lane does, and how to cancel a batch."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from loomserve.platform.cli.admin_client import AdminClient, AdminCommands
from loomserve.platform.cli.status import duration
from loomserve.platform.cli.tables import Figure, Row, display, stacked, table
from loomserve.platform.state import BatchLaneState, BatchState

batch = AdminCommands(no_args_is_help=True, help="Batches, of all API keys.")

BatchId = Annotated[str, typer.Argument(help="The batch's id.")]


@batch.command("list")
def list_batches(platform: AdminClient) -> None:
    """Show the batches that have not ended."""
    display(render(platform.get("batches", BatchLaneState)))


@batch.command()
def show(platform: AdminClient, batch_id: BatchId) -> None:
    """Show one batch, ended or not."""
    display(table("Batches", [_row(platform.get(f"batches/{batch_id}", BatchState))]))


@batch.command()
def cancel(platform: AdminClient, batch_id: BatchId) -> None:
    """Cancel a batch; what has been answered is kept."""
    platform.carry_out("POST", f"batches/{batch_id}/cancel")
    typer.echo(f"{batch_id} is being cancelled")


def render(state: BatchLaneState) -> RenderableType:
    """The lane as a table of its open batches and a line of counts."""
    counts = ", ".join(f"{count} {name}" for name, count in state.by_status.items() if count)
    note = (
        f"{counts or 'no batch'}; since the lane started {state.answered_lines} lines answered, "
        f"{state.failed_lines} failed, {state.retries} attempts failed"
    )
    offline = [
        Text(
            f"offline model {model.name} is not ready: {model.problem or 'it is being loaded'}",
            "yellow",
        )
        for model in state.offline_models
        if not model.ready
    ]
    return stacked(table("Batches", map(_row, state.batches)), *offline, Text(note, style="dim"))


def _row(one: BatchState) -> Row:
    ready = "-" if one.eta_s is None else duration(one.eta_s)
    return {
        "batch": one.id,
        "key": one.api_key or "-",
        "status": one.status,
        "lines": one.total,
        "done": one.completed,
        "failed": one.failed,
        "in flight": one.in_flight,
        "ready in": Figure(f"{ready} (late)" if one.late else ready),
        "window ends in": Figure(duration(max(0.0, one.expires_at - time.time()))),
    }

"""``loomserve batch``: what the batch lane does, and how to cancel a batch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from loomserve.platform.cli.status import DEFAULT_URL, Token, Url, carry_out, duration
from loomserve.platform.cli.tables import add_row, display, new_table, stacked
from loomserve.platform.state import BatchLaneState, BatchState

batch = typer.Typer(no_args_is_help=True, help="Batches, of all API keys.")

BatchId = Annotated[str, typer.Argument(help="The batch's id.")]


@batch.command("list")
def list_batches(url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show the batches that have not ended."""
    answer = carry_out("GET", url, token, "batches")
    display(render(BatchLaneState.model_validate_json(answer.content)))


@batch.command()
def show(batch_id: BatchId, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show one batch, ended or not."""
    answer = carry_out("GET", url, token, f"batches/{batch_id}")
    display(_table([BatchState.model_validate_json(answer.content)]))


@batch.command()
def cancel(batch_id: BatchId, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Cancel a batch; what has been answered is kept."""
    carry_out("POST", url, token, f"batches/{batch_id}/cancel")
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
    return stacked(_table(state.batches), *offline, Text(note, style="dim"))


def _table(batches: Iterable[BatchState]) -> Table:
    table = new_table(
        "batch", "key", "status",
        numbers=("lines", "done", "failed", "in flight", "ready in", "window ends in"),
        title="Batches",
    )  # fmt: skip
    for one in batches:
        ready = "-" if one.eta_s is None else duration(one.eta_s)
        add_row(
            table,
            one.id,
            one.api_key or "-",
            one.status,
            *map(str, (one.total, one.completed, one.failed, one.in_flight)),
            f"{ready} (late)" if one.late else ready,
            duration(max(0.0, one.expires_at - time.time())),
        )
    return table

"""``loomserve kv``: shows what the KV store holds, and empties it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from loomserve.platform.cli.admin_client import AdminClient, AdminCommands
from loomserve.platform.cli.tables import Row, display, fixed, mebibytes, stacked, table
from loomserve.platform.state import KvModelState, KvNetworkState, KvState

kv = AdminCommands(invoke_without_command=True, help="The store of KV blocks.")


@kv.callback()
def show(platform: AdminClient, context: typer.Context) -> None:
    """Show what the store holds."""
    if context.invoked_subcommand is None:
        display(render(platform.get("kv", KvState)))


@kv.command()
def flush(
    platform: AdminClient,
    model: Annotated[str, typer.Argument(help="Whose blocks; none named means all.")] = "",
) -> None:
    """Forget all blocks that no request reads at this moment and nobody pinned."""
    answer = platform.carry_out("POST", "kv/flush", {"model": model or None})
    typer.echo(f"{answer.json()['blocks']} blocks forgotten")


def render(state: KvState) -> RenderableType:
    note = f"{state.leases} leases, {state.writers} writers, {state.corrupt_blocks} corrupt blocks"
    return stacked(
        table("KV store", _tiers(state)),
        table("Blocks by model", map(_model, state.models)),
        *(_peers(one.network) for one in (state, *state.nodes.values()) if one.network),
        Text(note, style="dim"),
    )


def _tiers(state: KvState) -> Iterator[Row]:
    for name, used, capacity in (
        ("memory", state.used_bytes, state.capacity_bytes),
        ("ssd", state.ssd_used_bytes, state.ssd_capacity_bytes),
    ):
        if capacity:
            share = fixed(100 * used / capacity)
            yield {
                "tier": name,
                "used MiB": mebibytes(used),
                "of MiB": mebibytes(capacity),
                "%": share,
            }


def _model(model: KvModelState) -> Row:
    looked_up = model.hit_blocks + model.missed_blocks
    return {
        "model": model.model,
        "in memory": model.blocks_in_memory,
        "MiB": mebibytes(model.bytes_in_memory),
        "on SSD": model.blocks_on_ssd,
        "SSD MiB": mebibytes(model.bytes_on_ssd),
        "hits": model.hit_blocks,
        "misses": model.missed_blocks,
        "hit %": fixed(100 * model.hit_blocks / looked_up if looked_up else None),
        "evicted": model.evicted_blocks,
    }


def _peers(network: KvNetworkState) -> Table | Text:
    failed = ", ".join(f"{count} {reason}" for reason, count in network.failed_fetches.items())
    title = (
        f"Peers of {network.node}: {network.fetched_blocks} blocks fetched"
        f" ({mebibytes(network.fetched_bytes)} MiB), {network.directory_blocks} known"
        + (f"; failed: {failed}" if failed else "")
    )
    rows: list[Row] = [
        {
            "node": peer.node,
            "fetches": peer.fetches,
            "begin ms": fixed(1000 * peer.setup_s),
            "MiB/s": fixed(peer.bytes_per_s / 2**20, 0),
        }
        for peer in network.peers
    ]
    return table(title, rows) or Text(title)

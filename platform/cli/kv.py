"""``loomserve kv``: shows what the KV store holds, and empties it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from loomserve.platform.cli.status import DEFAULT_URL, Token, Url, carry_out
from loomserve.platform.cli.tables import add_row, display, new_table, stacked
from loomserve.platform.state import KvModelState, KvNetworkState, KvState

kv = typer.Typer(invoke_without_command=True, help="The store of KV blocks.")


@kv.callback()
def show(context: typer.Context, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show what the store holds."""
    if context.invoked_subcommand is None:
        state = KvState.model_validate_json(carry_out("GET", url, token, "kv").content)
        display(render(state))


@kv.command()
def flush(
    model: Annotated[str, typer.Argument(help="Whose blocks; none named means all.")] = "",
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Forget all blocks that no request reads at this moment and nobody pinned."""
    answer = carry_out("POST", url, token, "kv/flush", {"model": model or None})
    typer.echo(f"{answer.json()['blocks']} blocks forgotten")


def render(state: KvState) -> RenderableType:
    tiers = new_table("tier", numbers=("used MiB", "of MiB", "%"), title="KV store")
    for name, used, capacity in (
        ("memory", state.used_bytes, state.capacity_bytes),
        ("ssd", state.ssd_used_bytes, state.ssd_capacity_bytes),
    ):
        if capacity:
            share = f"{100 * used / capacity:.1f}"
            add_row(tiers, name, _mebibytes(used), _mebibytes(capacity), share)
    figures = ("in memory", "MiB", "on SSD", "MiB", "hits", "misses", "hit %", "evicted")
    models = new_table("model", numbers=figures, title="Blocks by model")
    for model in state.models:
        add_row(models, model.model, *_figures(model))
    note = f"{state.leases} leases, {state.writers} writers, {state.corrupt_blocks} corrupt blocks"
    tables = [tiers, models]
    tables += [_peers(one.network) for one in (state, *state.nodes.values()) if one.network]
    return stacked(*tables, Text(note, style="dim"))


def _peers(network: KvNetworkState) -> Table:
    failed = ", ".join(f"{count} {reason}" for reason, count in network.failed_fetches.items())
    peers = new_table(
        "node",
        numbers=("fetches", "begin ms", "MiB/s"),
        title=f"Peers of {network.node}: {network.fetched_blocks} blocks fetched"
        f" ({_mebibytes(network.fetched_bytes)} MiB), {network.directory_blocks} known"
        + (f"; failed: {failed}" if failed else ""),
    )
    for peer in network.peers:
        rate = peer.bytes_per_s / 2**20
        add_row(peers, peer.node, str(peer.fetches), f"{1000 * peer.setup_s:.1f}", f"{rate:.0f}")
    return peers


def _figures(model: KvModelState) -> list[str]:
    looked_up = model.hit_blocks + model.missed_blocks
    return [
        str(model.blocks_in_memory),
        _mebibytes(model.bytes_in_memory),
        str(model.blocks_on_ssd),
        _mebibytes(model.bytes_on_ssd),
        str(model.hit_blocks),
        str(model.missed_blocks),
        f"{100 * model.hit_blocks / looked_up:.1f}" if looked_up else "-",
        str(model.evicted_blocks),
    ]


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f}"

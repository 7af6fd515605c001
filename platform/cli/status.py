"""``loomserve status``: the platform's state as a table for people or as JSON for programs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loomserve.platform.cli.admin_client import AdminClient, StatusError, asks_platform
from loomserve.platform.cli.tables import Figure, Row, display, fixed, stacked, table
from loomserve.platform.config import LOCAL_NODE
from loomserve.platform.placement.plan import PlannedModel
from loomserve.platform.state import (
    LoanState,
    ModelState,
    ModelStatus,
    NodeStatus,
    PlatformState,
    ReplicaLoad,
    ReplicaState,
    ShardState,
)
from loomserve.platform.state.roles import Role

_REFRESH_S = 1.0

_STYLES = {
    ModelStatus.LOADING: "yellow",
    ModelStatus.READY: "green",
    ModelStatus.DEGRADED: "yellow",
    ModelStatus.ASLEEP: "blue",
    ModelStatus.WAKING: "yellow",
    ModelStatus.UNLOADED: "bright_black",
    ModelStatus.UNLOADING: "yellow",
    ModelStatus.FAILED: "red",
}
_NODE_STYLES = {
    NodeStatus.UP: "green",
    NodeStatus.DRAINING: "yellow",
    NodeStatus.DRAINED: "yellow",
    NodeStatus.DOWN: "red",
}


@asks_platform
def status(
    platform: AdminClient,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line a state.")] = False,
) -> None:
    """Show models, replicas and devices."""
    try:
        if as_json:
            for state in _states(platform, watch):
                typer.echo(state.model_dump_json())
        elif watch:
            with Live(screen=True, auto_refresh=False) as live:
                for state in _states(platform, watch):
                    live.update(render(state), refresh=True)
        else:
            display(render(platform.state()))
    except StatusError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _states(platform: AdminClient, watch: bool) -> Iterator[PlatformState]:
    yield platform.state()
    while watch:
        time.sleep(_REFRESH_S)
        yield platform.state()


def render(state: PlatformState) -> RenderableType:
    """The state as tables: models with a line a replica; others only if they have rows."""
    versions, models = state.versions, state.models
    loans = [
        loan
        for model in models
        for replica in model.replicas
        if replica.borrowing
        for loan in replica.borrowing.loans
    ]
    is_cluster = any(device.node != LOCAL_NODE for device in state.devices)
    return stacked(
        table("Models", _models(models), whole=2, sections=True)
        or Text("Models\nNo model is loaded."),
        *_messages(models),
        *parser_lines(models),
        table("Aliases", _aliases(state), whole=2, sections=True),
        table("Adapters", _adapters(models), whole=2),
        table("Scheduling", _scheduling(models)),
        loan_table(loans),
        table("Nodes", _nodes(state) if is_cluster else ()),
        table("Devices", _devices(state, on_nodes=is_cluster)),
        Text(
            f"loomserve {versions.loomserve}, vLLM {versions.vllm}, Ray {versions.ray}, "
            f"Python {versions.python}, up {duration(state.uptime_s)}",
            style="dim",
        ),
    )


def _models(models: tuple[ModelState, ...]) -> Iterator[Row]:
    for model in models:
        serving = sum(not replica.draining for replica in model.replicas)
        status = Text(f"{model.status} {serving}/{model.target_replicas}", _STYLES[model.status])
        lead: Row = {"model": model.name, "status": status}
        for replica in model.replicas or (None,):
            yield {**lead, **_replica(replica)}
            lead = {"model": "", "status": ""}


def _replica(replica: ReplicaState | None) -> Row:
    names = ("running", "waiting", "KV %", "step ms")
    if replica is None:
        return {"device": "", **dict.fromkeys(names, Figure()), "in flight": Figure()}
    measured = [Figure("-")] * 4
    if load := replica.load:
        kv, step = fixed(100 * load.kv_cache_usage), fixed(1000 * load.step_time_s)
        measured = [Figure(load.running), _waiting(load), kv, step]
    notes = [] if replica.role is Role.UNIFIED else [str(replica.role)]
    notes += ["draining"] if replica.draining else []
    notes += ["asleep"] if replica.asleep else []
    stages = [f"{stage.device}:{stage.layers}" for stage in replica.stages]
    where = " → ".join(stages) or replica.device
    device = f"{where} ({', '.join(notes)})" if notes else where
    return {
        "device": device,
        **dict(zip(names, measured, strict=True)),
        "in flight": replica.in_flight,
    }


def _waiting(load: ReplicaLoad) -> Figure:
    oldest = load.oldest_waiting_s
    return Figure(f"{load.waiting} ({oldest:.0f} s)" if oldest >= 1 else load.waiting)


def _messages(models: tuple[ModelState, ...]) -> Iterator[Text]:
    for model in models:
        if model.message:
            yield Text(f"{model.name}: {model.message}", _STYLES[model.status])
        for adapter in model.adapters:
            if adapter.message:
                yield Text(f"{adapter.name} of {model.name}: {adapter.message}", "red")
        if (scaling := model.scaling) is not None and scaling.why:
            bounds = f"{model.target_replicas} of {scaling.min} to {scaling.max} replicas"
            yield Text(f"{model.name}: {bounds}: {scaling.why}")


def parser_lines(models: Iterable[ModelState] | Iterable[PlannedModel]) -> Iterator[Text]:
    """Parsers of each model's tool calls and reasoning, and the reasons for them."""
    for model in models:
        if model.parsers is not None:
            tools, reasoning = model.parsers.tool_call, model.parsers.reasoning
            yield Text(f"{model.name}: tool calls: {tools}; reasoning: {reasoning}", "dim")


def _aliases(state: PlatformState) -> Iterator[Row]:
    """A row for each model of each alias."""
    statuses = {model.name: model.status for model in state.models}
    for alias in state.aliases:
        total = sum(alias.models.values())
        name, sticky = alias.name, alias.sticky or "-"
        for model, weight in alias.models.items():
            status = statuses.get(model)
            yield {
                "alias": name,
                "model": model,
                "status": Text(status or "not loaded", _STYLES[status] if status else "yellow"),
                "sticky": sticky,
                "weight": weight,
                "share %": fixed(100 * weight / total if total else None),
            }
            name = sticky = ""


def _adapters(models: tuple[ModelState, ...]) -> Iterator[Row]:
    for model in models:
        for adapter in model.adapters:
            yield {
                "adapter": adapter.name,
                "model": model.name,
                "source": adapter.source,
                "rank": fixed(adapter.rank, 0),
                "replicas": Figure(f"{len(adapter.replicas)}/{len(model.replicas)}"),
            }


def _scheduling(models: tuple[ModelState, ...]) -> Iterator[Row]:
    """A row for each engine that schedules for itself."""
    for model in models:
        for replica in model.replicas:
            if (load := replica.load) and (scheduling := load.scheduling):
                used, capacity = scheduling.swap_used_bytes, scheduling.swap_capacity_bytes
                yield {
                    "model": model.name,
                    "device": replica.device,
                    "queue": scheduling.queue,
                    "preempt": scheduling.preemption,
                    "turnaround": fixed(load.weighted_turnaround, 2),
                    "swapped": scheduling.swapped_out,
                    "recomputed": scheduling.recomputed,
                    "swap MiB": Figure(f"{used / 2**20:.0f}/{capacity / 2**20:.0f}"),
                }


def loan_table(loans: Iterable[LoanState]) -> Table | None:
    """A row for each loan, as its borrower sees it."""
    return table("Loans", map(_loan, loans))


def _loan(loan: LoanState) -> Row:
    notes = [] if loan.phase == "open" else [loan.phase]
    notes += ["draining"] if loan.draining else []
    notes += [_shard(loan.shard)] if loan.shard is not None else []
    return {
        "loan": loan.name,
        "borrower": loan.borrower,
        "lender": loan.lender,
        "requests": loan.requests,
        "blocks": Figure(f"{loan.usable_blocks - loan.free_blocks}/{loan.usable_blocks}"),
        "wait µs": fixed(loan.wait_mean_us, 0),
        "longest": fixed(loan.wait_max_us, 0),
        "wait %": fixed(100 * loan.wait_share),
        "service %": fixed(100 * loan.service_share),
        "": ", ".join(notes),
    }


def _shard(shard: ShardState) -> str:
    """Such as ``1 head away``."""
    if shard.layers is None:
        return f"{shard.heads} head{'s' if shard.heads > 1 else ''} {shard.phase}"
    return f"layers {shard.layers[0]} to {shard.layers[1] - 1} {shard.phase}"


def _nodes(state: PlatformState) -> Iterator[Row]:
    for node in state.nodes:
        status = Text(node.status, _NODE_STYLES[node.status])
        figures: Row = {"gateways": node.gateways, "replicas": node.replicas}
        yield {"node": node.name, "status": status, **figures}


def _devices(state: PlatformState, *, on_nodes: bool) -> Iterator[Row]:
    for device in state.devices:
        models = ", ".join(device.models) or "-"
        node: Row = {"node": device.node} if on_nodes else {}
        rest: Row = {"kind": device.kind, "place": device.place, "models": models}
        yield {"device": device.name, **node, **rest}


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    shown = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(shown[:2]) or "0 s"

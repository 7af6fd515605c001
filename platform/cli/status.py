"""``loomserve status``: the platform's state as a table for people or as JSON for programs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated

import httpx
import typer
from pydantic import ValidationError
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.cli.admin_token import on_this_machine, only_to_own_user, token_for
from loomserve.platform.cli.tables import add_row, display, new_table, stacked
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
    SchedulingState,
    ShardState,
)
from loomserve.platform.state.roles import Role

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
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


Url = Annotated[str, typer.Option(help="Where the platform listens.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="LOOMSERVE_ADMIN_TOKEN",
        help="The admin token; of a platform on this machine it is found without.",
    ),
]


class StatusError(LoomserveError):
    """The state could not be fetched; the message says what to do."""


class AdminError(LoomserveError):
    """The platform refused; the message is its own."""


def status(
    url: Url = DEFAULT_URL,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line a state.")] = False,
    token: Token = None,
) -> None:
    """Show models, replicas and devices."""
    try:
        with client_for(url) as client:
            if as_json:
                for state in _states(client, url, token, watch):
                    typer.echo(state.model_dump_json())
            elif watch:
                with Live(screen=True, auto_refresh=False) as live:
                    for state in _states(client, url, token, watch):
                        live.update(render(state), refresh=True)
            else:
                display(render(fetch(client, url, token)))
    except StatusError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def fetch(client: httpx.Client, url: str, token: str | None) -> PlatformState:
    """The state of the platform that listens at ``url``; raises StatusError."""
    answer = ask(client, url, token, "state")
    if answer.is_server_error:
        raise StatusError(
            f"{url} answered {answer.status_code}; it may still be starting: try again, "
            "then look at the log of loomserve serve"
        )
    try:
        return PlatformState.model_validate_json(answer.content if answer.is_success else b"")
    except ValidationError:
        raise StatusError(
            f"{url} answered {answer.status_code} with something that is not Loomserve's state; "
            "it may be the port of clients (server.admin_port is that of operators), another "
            "server, or another version: check --url"
        ) from None


def client_for(url: str) -> httpx.Client:
    """Client for a platform; to one on this machine it goes directly."""
    # A proxy that the environment names may be on another machine, which would see the token.
    direct = httpx.HTTPTransport() if on_this_machine(url) else None
    return httpx.Client(timeout=TIMEOUT_S, transport=direct)


def ask(
    client: httpx.Client,
    url: str,
    token: str | None,
    path: str,
    method: str = "GET",
    body: object = None,
) -> httpx.Response:
    """What the admin API of the platform at ``url`` answers.

    Without a token it is asked with the user's own, if it is on this machine.

    Raises:
        StatusError: nothing listens, or the token is missing or wrong.
        StartError: the file of the user's own token cannot be trusted, or another user listens.
    """
    token = token or token_for(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = client.request(
            method,
            f"{url.rstrip('/')}/admin/v1/{path}",
            headers=headers,
            json=body,
            extensions=only_to_own_user(url) if token else None,
        )
    except httpx.TimeoutException:
        raise StatusError(
            f"{url} did not answer within {TIMEOUT_S:.0f} s; look at the log of loomserve serve"
        ) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise StatusError(f"--url {url!r}: {error}; write it like {DEFAULT_URL}") from None
    except httpx.HTTPError as error:
        remedy = (
            "set SSL_CERT_FILE to its certificate or its authority's, and give --url a name that "
            "the certificate has"
            if "CERTIFICATE_VERIFY_FAILED" in str(error)
            else "start the platform with `loomserve serve`, or pass --url if it listens "
            "elsewhere, or with TLS (https://)"
        )
        raise StatusError(f"cannot reach {url} ({error}); {remedy}") from None
    if answer.status_code in {401, 403}:
        raise StatusError(
            f"{url} {'refuses this admin token' if token else 'asks for an admin token'}; "
            "pass it with --token or LOOMSERVE_ADMIN_TOKEN; loomserve serve says where it is"
        )
    return answer


def carry_out(
    method: str, url: str, token: str | None, path: str, body: object = None
) -> httpx.Response:
    """Answer of the admin API to a command; StatusError: there is none, AdminError: it refused."""
    with client_for(url) as client:
        answer = ask(client, url, token, path, method=method, body=body)
    if answer.is_success:
        return answer
    try:
        raise AdminError(str(answer.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        raise AdminError(
            f"{answer.url} answered {answer.status_code}, which is not Loomserve's: check --url"
        ) from None


def render(state: PlatformState) -> RenderableType:
    """The state as tables: models with a line a replica, aliases, scheduling, loans, devices."""
    versions = state.versions
    return stacked(
        _models(state.models),
        *_messages(state.models),
        *parser_lines(state.models),
        *_aliases(state),
        *_adapters(state),
        *_scheduling(state.models),
        *_loans(state.models),
        *_nodes(state),
        _devices(state),
        Text(
            f"loomserve {versions.loomserve}, vLLM {versions.vllm}, Ray {versions.ray}, "
            f"Python {versions.python}, up {duration(state.uptime_s)}",
            style="dim",
        ),
    )


def _states(
    client: httpx.Client, url: str, token: str | None, watch: bool
) -> Iterator[PlatformState]:
    yield fetch(client, url, token)
    while watch:
        time.sleep(_REFRESH_S)
        yield fetch(client, url, token)


def _models(models: tuple[ModelState, ...]) -> Table:
    table = new_table(
        "model", "status", "device",
        numbers=("running", "waiting", "KV %", "step ms", "in flight"), title="Models", whole=2,
    )  # fmt: skip
    for model in models:
        serving = sum(not replica.draining for replica in model.replicas)
        status = Text(f"{model.status} {serving}/{model.target_replicas}", _STYLES[model.status])
        rows = [_replica(replica) for replica in model.replicas] or [[]]
        add_row(table, model.name, status, *rows[0])
        for row in rows[1:]:
            add_row(table, "", "", *row)
        table.add_section()
    if not models:
        table.caption = "No model is loaded."
    return table


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
    """What reads each model's tool calls and reasoning, and why."""
    for model in models:
        if model.parsers is not None:
            tools, reasoning = model.parsers.tool_call, model.parsers.reasoning
            yield Text(f"{model.name}: tool calls: {tools}; reasoning: {reasoning}", "dim")


def _aliases(state: PlatformState) -> list[Table]:
    """A line for each model of each alias; no table if there is none."""
    statuses = {model.name: model.status for model in state.models}
    table = new_table(
        "alias", "model", "status", "sticky", numbers=("weight", "share %"), title="Aliases",
        whole=2,
    )  # fmt: skip
    for alias in state.aliases:
        total = sum(alias.models.values())
        lead = [alias.name, alias.sticky or "-"]
        for model, weight in alias.models.items():
            status = statuses.get(model)
            shown = Text(status or "not loaded", _STYLES[status] if status else "yellow")
            share = f"{100 * weight / total:.1f}" if total else "-"
            add_row(table, lead[0], model, shown, lead[1], str(weight), share)
            lead = ["", ""]
        table.add_section()
    return [table] if table.rows else []


def _adapters(state: PlatformState) -> list[Table]:
    """A line for each adapter; no table if there is none."""
    table = new_table(
        "adapter", "model", "source", numbers=("rank", "replicas"), title="Adapters",
        whole=2,
    )  # fmt: skip
    for model in state.models:
        for adapter in model.adapters:
            rank = "-" if adapter.rank is None else str(adapter.rank)
            replicas = f"{len(adapter.replicas)}/{len(model.replicas)}"
            add_row(table, adapter.name, model.name, adapter.source, rank, replicas)
    return [table] if table.rows else []


def _replica(replica: ReplicaState) -> list[str]:
    measured = ["-"] * 4
    if load := replica.load:
        kv, step = f"{load.kv_cache_usage * 100:.1f}", f"{load.step_time_s * 1000:.1f}"
        measured = [str(load.running), _waiting(load), kv, step]
    notes = [] if replica.role is Role.UNIFIED else [str(replica.role)]
    notes += ["draining"] if replica.draining else []
    notes += ["asleep"] if replica.asleep else []
    stages = [f"{stage.device}:{stage.layers}" for stage in replica.stages]
    where = " → ".join(stages) or replica.device
    device = f"{where} ({', '.join(notes)})" if notes else where
    return [device, *measured, str(replica.in_flight)]


def _waiting(load: ReplicaLoad) -> str:
    oldest = load.oldest_waiting_s
    return f"{load.waiting} ({oldest:.0f} s)" if oldest >= 1 else str(load.waiting)


def _scheduling(models: tuple[ModelState, ...]) -> list[Table]:
    """A line for each engine that schedules for itself; no table if none does."""
    table = new_table(
        "model", "device", "queue", "preempt",
        numbers=("turnaround", "swapped", "recomputed", "swap MiB"), title="Scheduling",
    )  # fmt: skip
    for model in models:
        for replica in model.replicas:
            load = replica.load
            if load and load.scheduling:
                cells = _schedule(load.scheduling, load.weighted_turnaround)
                add_row(table, model.name, replica.device, *cells)
    return [table] if table.rows else []


def _schedule(scheduling: SchedulingState, turnaround: float | None) -> list[str]:
    return [
        scheduling.queue,
        scheduling.preemption,
        "-" if turnaround is None else f"{turnaround:.2f}",
        str(scheduling.swapped_out),
        str(scheduling.recomputed),
        f"{scheduling.swap_used_bytes / 2**20:.0f}/{scheduling.swap_capacity_bytes / 2**20:.0f}",
    ]


def _loans(models: tuple[ModelState, ...]) -> list[Table]:
    loans = [
        loan
        for model in models
        for replica in model.replicas
        if replica.borrowing
        for loan in replica.borrowing.loans
    ]
    return [loan_table(loans)] if loans else []


def loan_table(loans: Iterable[LoanState]) -> Table:
    """A line for each loan, as its borrower sees it."""
    table = new_table(
        "loan", "borrower", "lender",
        numbers=("requests", "blocks", "wait µs", "longest", "wait %", "service %"), title="Loans",
    )  # fmt: skip
    table.add_column("", overflow="fold")
    for loan in loans:
        used = loan.usable_blocks - loan.free_blocks
        notes = [] if loan.phase == "open" else [loan.phase]
        notes += ["draining"] if loan.draining else []
        notes += [_shard(loan.shard)] if loan.shard is not None else []
        add_row(
            table,
            loan.name,
            loan.borrower,
            loan.lender,
            str(loan.requests),
            f"{used}/{loan.usable_blocks}",
            f"{loan.wait_mean_us:.0f}",
            f"{loan.wait_max_us:.0f}",
            f"{100 * loan.wait_share:.1f}",
            f"{100 * loan.service_share:.1f}",
            ", ".join(notes),
        )
    return table


def _shard(shard: ShardState) -> str:
    """Such as ``1 head away``."""
    if shard.layers is None:
        return f"{shard.heads} head{'s' if shard.heads > 1 else ''} {shard.phase}"
    return f"layers {shard.layers[0]} to {shard.layers[1] - 1} {shard.phase}"


def _nodes(state: PlatformState) -> list[Table]:
    """A line for each node of a cluster."""
    if not _is_cluster(state):
        return []
    table = new_table("node", "status", numbers=("gateways", "replicas"), title="Nodes")
    for node in state.nodes:
        status = Text(node.status, _NODE_STYLES[node.status])
        add_row(table, node.name, status, str(node.gateways), str(node.replicas))
    return [table]


def _devices(state: PlatformState) -> Table:
    on_nodes = _is_cluster(state)
    columns = ["device", *(["node"] if on_nodes else []), "kind", "place", "models"]
    table = new_table(*columns, title="Devices")
    for device in state.devices:
        node = [device.node] if on_nodes else []
        models = ", ".join(device.models) or "-"
        add_row(table, device.name, *node, device.kind, device.place, models)
    return table


def _is_cluster(state: PlatformState) -> bool:
    return any(device.node != LOCAL_NODE for device in state.devices)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    shown = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(shown[:2]) or "0 s"

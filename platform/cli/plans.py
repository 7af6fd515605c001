"""``loomserve admin plans``: make, show and carry out plans that move work between devices."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from loomserve.platform.cli.status import DEFAULT_URL, Token, Url, carry_out
from loomserve.platform.cli.tables import add_row, display, new_table, stacked
from loomserve.platform.rebalancing.plans.plans import Plan
from loomserve.platform.rebalancing.plans.reports import (
    Events,
    MadePlan,
    PlanList,
    RebalancingState,
)
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    Move,
    MoveRequests,
    RemoveReplica,
    SetRole,
)
from loomserve.platform.rebalancing.policy.snapshot import MoveKind
from loomserve.platform.state.roles import Role

plans = typer.Typer(invoke_without_command=True, help="What moves between devices.")

PlanId = Annotated[str, typer.Argument(help="The plan's id.")]
Force = Annotated[bool, typer.Option("--force", help="Limits may be exceeded.")]
Replica = Annotated[str, typer.Argument(help="A replica's id, as loomserve status shows it.")]


class _Mode(StrEnum):
    OFF = "off"
    ADVISE = "advise"
    AUTO = "auto"


@plans.callback()
def show_all(context: typer.Context, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show the devices' loads and the latest plans."""
    if context.invoked_subcommand is None:
        state = carry_out("GET", url, token, "rebalancing").content
        latest = carry_out("GET", url, token, "plans").content
        shown = render(
            RebalancingState.model_validate_json(state), PlanList.model_validate_json(latest)
        )
        display(shown)


@plans.command()
def make(url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Say what would move now, and why all else would not; nothing moves."""
    _make(url, token, {})


@plans.command()
def move(
    kind: Annotated[MoveKind, typer.Argument(help="What moves: requests, heads or layers.")],
    engine: Annotated[str, typer.Argument(help="The replica whose work it is.")],
    lender: Annotated[str, typer.Argument(help="The replica that does it, or shall.")],
    amount: Annotated[int, typer.Argument(min=1, help="Bytes of KV, KV heads or layers.")],
    back: Annotated[bool, typer.Option("--back", help="From the lender home.")] = False,
    force: Force = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Make a plan that moves some of a replica's work to a lender, or home."""
    _make_of(
        Move(kind=kind, engine=engine, lender=lender, amount=amount, back=back), force, url, token
    )


@plans.command("move-running")
def move_running(
    replica: Replica,
    to: Annotated[str, typer.Argument(help="Another replica of its model.")],
    requests: Annotated[int, typer.Argument(min=1, help="How many; those that wait first.")],
    force: Force = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Make a plan that has some of a replica's requests go on with another one."""
    _make_of(MoveRequests(engine=replica, to=to, requests=requests), force, url, token)


@plans.command()
def role(
    replica: Replica,
    role: Annotated[Role, typer.Argument(help="unified, prefill or decode.")],
    force: Force = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Make a plan that changes what is sent to a replica."""
    _make_of(SetRole(engine=replica, role=role), force, url, token)


@plans.command()
def add(
    model: Annotated[str, typer.Argument(help="The model.")],
    device: Annotated[str, typer.Argument(help="The next free one of its devices.")],
    force: Force = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Make a plan that starts one more replica."""
    _make_of(AddReplica(model=model, device=device), force, url, token)


@plans.command()
def remove(
    replica: Replica, force: Force = False, url: Url = DEFAULT_URL, token: Token = None
) -> None:
    """Make a plan that ends a replica, and has its requests go on with the others."""
    _make_of(RemoveReplica(engine=replica), force, url, token)


@plans.command()
def show(plan: PlanId, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show a plan, step by step."""
    content = carry_out("GET", url, token, f"plans/{plan}").content
    display(render_plan(Plan.model_validate_json(content)))


@plans.command()
def apply(plan: PlanId, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Carry a plan out."""
    carry_out("POST", url, token, f"plans/{plan}/apply")
    typer.echo(f"{plan} is carried out; loomserve admin plans show {plan} tells how far it is")


@plans.command()
def abort(plan: PlanId, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Leave what a plan has not begun, and take back what is under way."""
    content = carry_out("POST", url, token, f"plans/{plan}/abort").content
    typer.echo(f"{plan} is {Plan.model_validate_json(content).status}")


@plans.command()
def mode(
    to: Annotated[_Mode, typer.Argument(help="off, advise or auto.")],
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Say whether plans are made, and whether they are carried out by themselves."""
    carry_out("PUT", url, token, "rebalancing", {"mode": to})
    typer.echo(f"rebalancing is {to}")


@plans.command()
def pause(url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Begin no action any more; one that is under way goes on."""
    carry_out("PUT", url, token, "rebalancing", {"paused": True})
    typer.echo("no action begins until loomserve admin plans resume")


@plans.command()
def resume(url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Let actions begin again."""
    carry_out("PUT", url, token, "rebalancing", {"paused": False})
    typer.echo("actions begin again")


@plans.command()
def events(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Events at most.")] = 20,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Show what was done, the newest first."""
    content = carry_out("GET", url, token, f"rebalancing/events?limit={limit}").content
    table = new_table("when", "what", "plan", "action", "before", "after", "")
    for event in Events.model_validate_json(content).events:
        action = said(event.action) if event.action else ""
        loads = (_loads(event.loads_before), _loads(event.loads_after))
        made = (_when(event.at), event.kind, event.plan or "", action)
        add_row(table, *made, *loads, event.message)
    display(table)


def _make_of(action: Action, force: bool, url: str, token: str | None) -> None:
    _make(url, token, {"actions": [action.model_dump(mode="json")], "force": force})


def _make(url: str, token: str | None, wish: dict[str, Any]) -> None:
    made = MadePlan.model_validate_json(carry_out("POST", url, token, "plans", wish).content)
    display(render_made(made))


def render(state: RebalancingState, latest: PlanList) -> RenderableType:
    """Loads, what keeps plans from being made, and the latest plans."""
    paused = ", paused" if state.paused else ""
    title = Text(f"Rebalancing is {state.mode}{paused}")
    if state.problem is not None:
        title.append(f"; it does not act: {state.problem}", style="red")
    devices = new_table("device", numbers=("compute", "memory", "together"), title="Devices")
    devices.add_column("")
    for load in state.devices:
        shares = (f"{each:.2f}" for each in (load.compute, load.memory, load.utilisation))
        add_row(devices, load.device, *shares, load.level)
    table = new_table(
        "plan", "made", "by", "status", "actions",
        numbers=("gain", "really", "cost s", "pause ms"), title="Plans",
    )  # fmt: skip
    for plan in latest.plans:
        real = "-" if plan.real_gain is None else f"{plan.real_gain:.2f}"
        predicted = plan.predicted
        figures = (f"{predicted.gain:.2f}", real, f"{predicted.cost_s:.1f}")
        add_row(
            table,
            plan.id,
            _when(plan.created),
            plan.origin,
            plan.status,
            "\n".join(map(said, plan.actions)),
            *figures,
            f"{1000 * predicted.pause_s:.1f}",
        )
    missing = [Text(f"missing: {flaw.subject} ({flaw.why})") for flaw in state.flaws]
    scaled = [
        Text(f"{each.model}: load for {each.load:.1f} replicas, {each.replicas} wanted")
        for each in (state.scaling.models if state.scaling else ())
    ]
    return stacked(title, devices, *missing, *scaled, table)


def render_plan(plan: Plan) -> RenderableType:
    """Its steps, predicted and real, and the loads before and after."""
    forced = ", forced" if plan.forced else ""
    title = f"{plan.id} of {_when(plan.created)} by the {plan.origin}{forced}: {plan.status}"
    figures = ("gain", "really", "s", "really", "pause ms", "moved MiB")
    table = new_table("action", "status", numbers=figures, title=title, whole=0)
    table.add_column("")
    for step in plan.steps:
        real = step.real
        add_row(
            table,
            said(step.action),
            step.status,
            f"{step.predicted.gain:.2f}",
            "-" if real is None else f"{real.gain:.2f}",
            f"{step.predicted.duration_s:.1f}",
            "-" if real is None else f"{real.duration_s:.1f}",
            f"{1000 * step.predicted.pause_s:.1f}",
            f"{step.moved_bytes / 2**20:.1f}",
            step.message,
        )
    return table


def render_made(made: MadePlan) -> RenderableType:
    """The plan, or why there is none, and the candidates that were not chosen."""
    parts: list[RenderableType] = [
        Text("nothing would be moved") if made.plan is None else render_plan(made.plan)
    ]
    parts += [Text(f"missing: {flaw.subject} ({flaw.why})") for flaw in made.flaws]
    if made.rejected:
        table = new_table("not chosen", "reason", "", whole=0)
        for each in made.rejected:
            add_row(table, said(each.action), each.reason, each.detail)
        parts.append(table)
    if made.plan is not None:
        parts.append(Text(f"loomserve admin plans apply {made.plan.id} carries it out"))
    return stacked(*parts)


def said(action: Action) -> str:
    """The action in a few words."""
    match action:
        case Move():
            size = (
                f"{action.amount / 2**20:.1f} MiB of requests"
                if action.kind is MoveKind.REQUESTS
                else f"{action.amount} {action.kind}"
            )
            way = "home from" if action.back else "to"
            return f"{size} of {action.engine} {way} {action.lender}"
        case MoveRequests():
            return f"{action.requests} requests of {action.engine} go on with {action.to}"
        case SetRole():
            return f"{action.engine} becomes {action.role}"
        case AddReplica():
            return f"one more replica of {action.model} on {action.device}"
        case RemoveReplica():
            return f"{action.engine} ends"


def _loads(loads: dict[str, float] | None) -> str:
    return " ".join(f"{device} {load:.2f}" for device, load in (loads or {}).items())


def _when(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))

"""``loomserve admin plans``: make, show and carry out plans that move work between devices."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from loomserve.platform.cli.admin_client import AdminClient, AdminCommands
from loomserve.platform.cli.tables import Row, display, fixed, stacked, table
from loomserve.platform.rebalancing.plans.plans import Plan, PlanStep
from loomserve.platform.rebalancing.plans.reports import (
    Events,
    MadePlan,
    Mode,
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

plans = AdminCommands(invoke_without_command=True, help="What moves between devices.")

PlanId = Annotated[str, typer.Argument(help="The plan's id.")]
Force = Annotated[bool, typer.Option("--force", help="Limits may be exceeded.")]
Replica = Annotated[str, typer.Argument(help="A replica's id, as loomserve status shows it.")]


@plans.callback()
def show_all(platform: AdminClient, context: typer.Context) -> None:
    """Show the devices' loads and the latest plans."""
    if context.invoked_subcommand is None:
        state = platform.get("rebalancing", RebalancingState)
        display(render(state, platform.get("plans", PlanList)))


@plans.command()
def make(platform: AdminClient) -> None:
    """Say what would move now, and why all else would not; nothing moves."""
    _make(platform, {})


@plans.command()
def move(
    platform: AdminClient,
    kind: Annotated[MoveKind, typer.Argument(help="What moves: requests, heads or layers.")],
    engine: Annotated[str, typer.Argument(help="The replica whose work it is.")],
    lender: Annotated[str, typer.Argument(help="The replica that does it now or later.")],
    amount: Annotated[int, typer.Argument(min=1, help="Bytes of KV, KV heads or layers.")],
    back: Annotated[bool, typer.Option("--back", help="From the lender home.")] = False,
    force: Force = False,
) -> None:
    """Make a plan that moves some of a replica's work to a lender, or home."""
    moved = Move(kind=kind, engine=engine, lender=lender, amount=amount, back=back)
    _make_of(platform, moved, force)


@plans.command("move-running")
def move_running(
    platform: AdminClient,
    replica: Replica,
    to: Annotated[str, typer.Argument(help="Another replica of its model.")],
    requests: Annotated[int, typer.Argument(min=1, help="How many; those that wait first.")],
    force: Force = False,
) -> None:
    """Make a plan that has some of a replica's requests go on with another one."""
    _make_of(platform, MoveRequests(engine=replica, to=to, requests=requests), force)


@plans.command()
def role(
    platform: AdminClient,
    replica: Replica,
    role: Annotated[Role, typer.Argument(help="unified, prefill or decode.")],
    force: Force = False,
) -> None:
    """Make a plan that changes what is sent to a replica."""
    _make_of(platform, SetRole(engine=replica, role=role), force)


@plans.command()
def add(
    platform: AdminClient,
    model: Annotated[str, typer.Argument(help="The model.")],
    device: Annotated[str, typer.Argument(help="The next free one of its devices.")],
    force: Force = False,
) -> None:
    """Make a plan that starts one more replica."""
    _make_of(platform, AddReplica(model=model, device=device), force)


@plans.command()
def remove(platform: AdminClient, replica: Replica, force: Force = False) -> None:
    """Make a plan that ends a replica, and has its requests go on with the others."""
    _make_of(platform, RemoveReplica(engine=replica), force)


@plans.command()
def show(platform: AdminClient, plan: PlanId) -> None:
    """Show a plan, step by step."""
    display(render_plan(platform.get(f"plans/{plan}", Plan)))


@plans.command()
def apply(platform: AdminClient, plan: PlanId) -> None:
    """Carry a plan out."""
    platform.carry_out("POST", f"plans/{plan}/apply")
    typer.echo(f"{plan} is carried out; loomserve admin plans show {plan} tells how far it is")


@plans.command()
def abort(platform: AdminClient, plan: PlanId) -> None:
    """Leave what a plan has not begun, and take back what is under way."""
    answer = platform.carry_out("POST", f"plans/{plan}/abort")
    typer.echo(f"{plan} is {Plan.model_validate_json(answer.content).status}")


@plans.command()
def mode(
    platform: AdminClient, to: Annotated[Mode, typer.Argument(help="off, advise or auto.")]
) -> None:
    """Say whether plans are made, and whether they are carried out by themselves."""
    platform.carry_out("PUT", "rebalancing", {"mode": to})
    typer.echo(f"rebalancing is {to}")


@plans.command()
def pause(platform: AdminClient) -> None:
    """Begin no action any more; one that is under way goes on."""
    platform.carry_out("PUT", "rebalancing", {"paused": True})
    typer.echo("no action begins until loomserve admin plans resume")


@plans.command()
def resume(platform: AdminClient) -> None:
    """Let actions begin again."""
    platform.carry_out("PUT", "rebalancing", {"paused": False})
    typer.echo("actions begin again")


@plans.command()
def events(
    platform: AdminClient,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Events at most.")] = 20,
) -> None:
    """Show what was done, the newest first."""
    found = platform.get(f"rebalancing/events?limit={limit}", Events).events
    rows = (
        {
            "when": _when(event.at),
            "what": event.kind,
            "plan": event.plan or "",
            "action": said(event.action) if event.action else "",
            "before": _loads(event.loads_before),
            "after": _loads(event.loads_after),
            "": event.message,
        }
        for event in found
    )
    display(table(None, rows) or Text("no events"))


def _make_of(platform: AdminClient, action: Action, force: bool) -> None:
    _make(platform, {"actions": [action.model_dump(mode="json")], "force": force})


def _make(platform: AdminClient, request: object) -> None:
    answer = platform.carry_out("POST", "plans", request)
    display(*render_made(MadePlan.model_validate_json(answer.content)))


def render(state: RebalancingState, latest: PlanList) -> RenderableType:
    """Loads, what keeps plans from being made, and the latest plans."""
    paused = ", paused" if state.paused else ""
    title = Text(f"Rebalancing is {state.mode}{paused}")
    if state.problem is not None:
        title.append(f"; it does not act: {state.problem}", style="red")
    devices: list[Row] = [
        {
            "device": load.device,
            "compute": fixed(load.compute, 2),
            "memory": fixed(load.memory, 2),
            "together": fixed(load.utilisation, 2),
            "": load.level,
        }
        for load in state.devices
    ]
    made: list[Row] = [
        {
            "plan": plan.id,
            "made": _when(plan.created),
            "by": plan.origin,
            "status": plan.status,
            "actions": "\n".join(map(said, plan.actions)),
            "gain": fixed(plan.predicted.gain, 2),
            "really": fixed(plan.real_gain, 2),
            "cost s": fixed(plan.predicted.cost_s),
            "pause ms": fixed(1000 * plan.predicted.pause_s),
        }
        for plan in latest.plans
    ]
    missing = [Text(f"missing: {flaw.subject} ({flaw.why})") for flaw in state.flaws]
    scaled = [
        Text(f"{each.model}: load for {each.load:.1f} replicas, {each.replicas} wanted")
        for each in (state.scaling.models if state.scaling else ())
    ]
    return stacked(title, table("Devices", devices), *missing, *scaled, table("Plans", made))


def render_plan(plan: Plan) -> RenderableType | None:
    """Its steps, predicted and real, and the loads before and after."""
    forced = ", forced" if plan.forced else ""
    title = f"{plan.id} of {_when(plan.created)} by the {plan.origin}{forced}: {plan.status}"
    return table(title, map(_step, plan.steps), whole=0)


def _step(step: PlanStep) -> Row:
    predicted, real = step.predicted, step.real
    return {
        "action": said(step.action),
        "status": step.status,
        "gain": fixed(predicted.gain, 2),
        "real gain": fixed(None if real is None else real.gain, 2),
        "s": fixed(predicted.duration_s),
        "real s": fixed(None if real is None else real.duration_s),
        "pause ms": fixed(1000 * predicted.pause_s),
        "moved MiB": fixed(step.moved_bytes / 2**20),
        "": step.message,
    }


def render_made(made: MadePlan) -> list[RenderableType | None]:
    """The plan, or why there is none, and the candidates that were not chosen."""
    rejected: list[Row] = [
        {"not chosen": said(each.action), "reason": each.reason, "": each.detail}
        for each in made.rejected
    ]
    plan = made.plan
    return [
        Text("nothing would be moved") if plan is None else render_plan(plan),
        *(Text(f"missing: {flaw.subject} ({flaw.why})") for flaw in made.flaws),
        table(None, rejected, whole=0),
        None if plan is None else Text(f"loomserve admin plans apply {plan.id} carries it out"),
    ]


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

"""``loomserve placement`` and ``loomserve plan``: what would run on which device, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Console

from loomserve.platform import config as configuration
from loomserve.platform.base.errors import ConfigError
from loomserve.platform.cli.admin_client import AdminClient, asks_platform
from loomserve.platform.cli.status import parser_lines
from loomserve.platform.cli.tables import Figure, Row, display, fixed, say, table
from loomserve.platform.config import Model
from loomserve.platform.placement import device_profile
from loomserve.platform.placement.configured import profile_path, wanted_of
from loomserve.platform.placement.own_placement import placed_here
from loomserve.platform.placement.plan import PlacementPlan, plan_of_file, plan_of_platform
from loomserve.platform.placement.policy import explanation, placer
from loomserve.platform.placement.policy.helr import MODES, Mode
from loomserve.platform.placement.policy.placer import PlacedModel, Wanted


def placement(
    path: Annotated[Path, typer.Argument(help="The configuration file.")],
    mode: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(MODES)}: every model with several devices as a pipeline."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What loomserve profile devices wrote.")
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=SHARE of the time that it is busy (0 to 1); hot ones go first."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Divide models' layers among their devices; exit with 1 if one does not fit."""
    checked = configuration.load(path)
    if checked.cluster is None:
        checked = placed_here(checked, path.parent, _say).config
    if mode is not None and mode not in MODES:
        raise ConfigError(f"--mode {mode!r}: write one of {', '.join(MODES)}")
    wanted = [
        wanted_of(model, path.parent, _mode(model, mode))
        for model in checked.models
        if model.pipeline is not None or (mode is not None and len(model.devices) > 1)
    ]
    if not wanted:
        raise ConfigError(
            f"{path}: no model has a pipeline; give one pipeline: {{mode: balanced}}, or "
            "--mode to see what that would be"
        )
    measured = device_profile.load(profile or profile_path(checked, path.parent))
    placed = placer.place_models(_loaded(wanted, load or []), measured)
    if as_json:
        _print_json({"models": [explanation.as_dict(each) for each in placed]})
    else:
        for each in placed:
            _print(each)
    if any(each.placement is None for each in placed):
        raise typer.Exit(1)


@asks_platform
def plan(
    platform: AdminClient,
    path: Annotated[
        Path | None, typer.Argument(help="The configuration file; none: what runs now.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show where models go, which start at once, and why; nothing has to run for a file."""
    shown = plan_of_platform(platform.state()) if path is None else plan_of_file(path, _say)
    if as_json:
        _print_json(TypeAdapter(PlacementPlan).dump_python(shown, mode="json"))
        return
    devices: list[Row] = [
        {"device": each.name, "place": each.place, "GiB for models": _gib(each.memory)}
        for each in shown.devices
    ]
    models: list[Row] = [
        {
            "model": each.name,
            "devices": ", ".join(each.devices),
            "start": each.start,
            "GiB": _gib(each.size),
            "why": each.why,
        }
        for each in shown.models
    ]
    display(table("Devices", devices), table("Models", models), *parser_lines(shown.models))


def _print_json(data: object) -> None:
    Console(highlight=False, soft_wrap=True).print_json(data=data)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _gib(size: float | None) -> Figure:
    return fixed(None if size is None else size / 2**30)


def _mode(model: Model, given: str | None) -> Mode:
    for mode in MODES:
        if mode == given:
            return mode
    return model.pipeline.mode if model.pipeline else "balanced"


def _loaded(wanted: list[Wanted], given: list[str]) -> list[Wanted]:
    loads: dict[str, float] = {}
    names = [each.name for each in wanted]
    for text in given:
        name, _, share = text.partition("=")
        try:
            loads[name] = float(share)
        except ValueError:
            loads[name] = -1.0
        if name not in names or not 0 <= loads[name] < 1:
            raise ConfigError(
                f"--load {text!r}: write MODEL=SHARE, of {', '.join(names)}, from 0 to below 1"
            )
    return [replace(each, load=loads.get(each.name, each.load)) for each in wanted]


def _print(placed: PlacedModel) -> None:
    name = placed.wanted.name
    if placed.placement is None:
        say(f"{name}: {explanation.why_not(placed)}")
        return
    title = f"{name} ({placed.placement.mode})"
    display(table(title, explanation.rows(placed), whole=2))
    for line in explanation.summary(placed):
        say(line)
    others = explanation.alternatives(placed)
    display(table("Why not others", (explanation.other_row(placed, each) for each in others)))

"""``loomserve plan``: which layers of which model would run on which device, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loomserve.platform import catalog
from loomserve.platform import config as configuration
from loomserve.platform.config import Config, Model
from loomserve.platform.errors import ConfigError, StartError
from loomserve.platform.placement import device_profile, explanation, model_shape, planner
from loomserve.platform.placement.helr import MODES, Mode
from loomserve.platform.placement.planner import Planned, Wanted

_console = Console(highlight=False, soft_wrap=True)


def plan(
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
    planned = planner.plan(_loaded(wanted, load or []), measured)
    if as_json:
        _console.print_json(data={"models": [explanation.as_dict(each) for each in planned]})
    else:
        for each in planned:
            _print(each)
    if any(each.placement is None for each in planned):
        raise typer.Exit(1)


def wanted_of(model: Model, base: Path, mode: Mode) -> Wanted:
    """A configured model as the planner sees it.

    Raises:
        ConfigError: its weights are not in a folder here, or have no layers.
    """
    folder = catalog.resolve(model.source, base, progress=lambda _: None)
    if not isinstance(folder, Path):
        raise ConfigError(
            f"model {model.name!r}: its layers must be known before it starts: download "
            f"{model.source} to a folder and give that as source, or set pipeline.layers"
        )
    return Wanted(
        name=model.name,
        source=model.source,
        shape=model_shape.read(folder),
        devices=model.devices,
        kv_bytes=model.kv_cache_memory,
        mode=mode,
        batch=model.pipeline.batch if model.pipeline else 8,
    )


def stages_of(model: Model, base: Path) -> list[tuple[str, int]]:
    """Devices of a model that is a pipeline, in the order of its layers, and how many each has.

    Raises:
        ConfigError: it has neither layers nor a profile of its devices.
        StartError: its devices do not hold it.
    """
    assert model.pipeline is not None
    if model.pipeline.layers:
        return list(zip(model.devices, model.pipeline.layers, strict=True))
    written = model.pipeline.profile
    measured = device_profile.load(base / written if written else device_profile.default_path())
    (planned,) = planner.plan([wanted_of(model, base, model.pipeline.mode)], measured)
    if planned.placement is None:
        raise StartError(f"model {model.name!r}: {explanation.why_not(planned)}")
    return planned.stages


def profile_path(config: Config, base: Path) -> Path:
    """The first that a model of the configuration names, or the default."""
    named = (model.pipeline.profile for model in config.models if model.pipeline is not None)
    written = next((path for path in named if path is not None), None)
    return base / written if written else device_profile.default_path()


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
    return [
        Wanted(**{**vars(each), "load": loads.get(each.name, each.load)}) for each in wanted
    ]


def _print(planned: Planned) -> None:
    name = planned.wanted.name
    if planned.placement is None:
        _console.print(f"{name}: {explanation.why_not(planned)}", markup=False)
        return
    table = Table(
        "stage", "device", "layers", "memory", "busy a step", "",
        title=f"{name} ({planned.placement.mode})", title_justify="left",
    )  # fmt: skip
    for row in explanation.rows(planned):
        table.add_row(*row)
    _console.print(table)
    for line in explanation.summary(planned):
        _console.print(line, markup=False)
    others = Table("instead", "layers", "step every", "latency", "", title="Why not others",
                   title_justify="left")  # fmt: skip
    for other in explanation.alternatives(planned):
        others.add_row(*explanation.other_row(planned, other))
    _console.print(others)


def as_config(planned: Planned) -> dict[str, Any]:
    """What to write into the configuration to keep the map."""
    return {
        "devices": [device for device, _ in planned.stages],
        "pipeline": {"layers": [layers for _, layers in planned.stages]},
    }

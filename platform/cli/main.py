"""The ``loomserve`` command."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loomserve.platform import config as configuration
from loomserve.platform.access.live_keys import read_keys, with_absolute_path
from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.cli.batch import batch
from loomserve.platform.cli.keys import keys
from loomserve.platform.cli.kv import kv
from loomserve.platform.cli.lending import lending
from loomserve.platform.cli.lengths import lengths
from loomserve.platform.cli.node import node
from loomserve.platform.cli.placement import placement, plan
from loomserve.platform.cli.plans import plans
from loomserve.platform.cli.profile import profile
from loomserve.platform.cli.status import status
from loomserve.platform.config.reference import describe
from loomserve.platform.kubernetes.commands import kube

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Serve many models at once.")
config_app = typer.Typer(no_args_is_help=True, help="Check and explain the configuration.")
admin_app = typer.Typer(no_args_is_help=True, help="Change what runs, while it runs.")
app.add_typer(config_app, name="config")
app.add_typer(keys, name="key")
app.add_typer(kv, name="kv")
app.add_typer(lengths, name="lengths")
app.add_typer(kube, name="kube")
app.add_typer(batch, name="batch")
app.add_typer(admin_app, name="admin")
admin_app.add_typer(lending, name="lending")
admin_app.add_typer(plans, name="plans")
app.command()(node)
app.command()(status)
app.add_typer(profile, name="profile")
app.command()(placement)
app.command()(plan)

_console = Console(stderr=False, highlight=False, soft_wrap=True)
ConfigPath = Annotated[Path, typer.Argument(help="The configuration file.")]


def _say_version(asked: bool) -> None:
    if asked:
        print(f"loomserve {metadata.version('loomserve')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Say which version this is.", callback=_say_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of the command itself; its first line of help is the app's."""


@app.command()
def serve(path: ConfigPath = Path("examples/laptop.yaml")) -> None:
    """Serve the models of a configuration until Ctrl-C."""
    # Only here: the other commands need neither Ray nor torch.
    from loomserve.platform.cli import serve

    serve.run(configuration.load(path), path.parent, _say)


@config_app.command("check")
def config_check(path: ConfigPath) -> None:
    """Say whether a configuration is right; exit with 2 if it is not."""
    from loomserve.platform.adapters.sources import check_configured
    from loomserve.platform.engine.options.names import check
    from loomserve.platform.lengths.stored import check_predictor
    from loomserve.platform.models import catalog

    checked = configuration.load(path)
    read_keys(with_absolute_path(checked.server, path.parent))
    for model in checked.models:
        check_predictor(model)
        check(model.name, model.engine)
        if not model.source.startswith("demo"):  # checking must not download
            catalog.resolve(model.source, path.parent, _say, revision=model.revision)
        check_configured(model, path.parent)
    where = f"{len(checked.devices)} devices" if checked.devices else "all devices that there are"
    _say(f"{path}: {len(checked.models)} models on {where}; all is well")


@config_app.command("describe")
def config_describe() -> None:
    """Explain every field."""
    print(describe())


def _say(text: str) -> None:
    _console.print(text, markup=False)


def main() -> None:
    try:
        app()
    except LoomserveError as error:
        print(f"loomserve: {error}", file=sys.stderr)
        sys.exit(2)

"""The ``loomserve`` command."""

from __future__ import annotations

import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from loomserve.platform import config as configuration
from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.cli import IS_COMMAND
from loomserve.platform.cli.batch import batch
from loomserve.platform.cli.keys import keys
from loomserve.platform.cli.kv import kv
from loomserve.platform.cli.lending import lending
from loomserve.platform.cli.lengths import lengths
from loomserve.platform.cli.node import Debug, node
from loomserve.platform.cli.placement import placement, plan
from loomserve.platform.cli.plans import plans
from loomserve.platform.cli.profile import profile
from loomserve.platform.cli.status import status
from loomserve.platform.cli.tables import say
from loomserve.platform.config.reference import describe
from loomserve.platform.kubernetes.commands import kube
from loomserve.platform.run.ending import report

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
    debug: Debug = False,
) -> None:
    """Options of the command itself; its first line of help is the app's."""


@app.command()
def serve(path: ConfigPath = Path("examples/laptop.yaml"), debug: Debug = False) -> None:
    """Serve the models of a configuration until Ctrl-C."""
    # Only here: the other commands need neither Ray nor torch.
    from loomserve.platform.cli import serve

    serve.run(configuration.load(path), path.parent, say)


@config_app.command("check")
def config_check(
    path: ConfigPath,
    here: Annotated[
        bool, typer.Option("--here", help="Look at this machine as well, as serve does.")
    ] = False,
) -> None:
    """Say whether a configuration is right; exit with 2 if it is not."""
    from loomserve.platform.cli.checks.configuration import check_configuration, check_here

    checked = configuration.load(path)
    check_configuration(checked, path.parent, say)
    if here:
        check_here(checked, path.parent, say)
    where = f"{len(checked.devices)} devices" if checked.devices else "all devices that there are"
    say(f"{path}: {len(checked.models)} models on {where}; all is well")


@config_app.command("describe")
def config_describe() -> None:
    """Explain every field."""
    print(describe())


def main() -> None:
    if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except Exception as error:
        report(error)
        sys.exit(2 if isinstance(error, LoomserveError) else 1)

"""``loomserve kube``: what the chart and its pods need of Loomserve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from loomserve.platform import config as configuration
from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Config, Model, OfflineModel
from loomserve.platform.config.base import parse_bytes
from loomserve.platform.kubernetes.pods import pod_environment, prepare_pod
from loomserve.platform.kubernetes.values import derived_values
from loomserve.platform.models import catalog

kube = typer.Typer(no_args_is_help=True, help="Run on Kubernetes.")


@kube.command()
def values(
    path: Annotated[Path, typer.Argument(help="The configuration file.")],
    weights: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=SIZE of weights that are not on this machine, such as m=16GiB."),
    ] = None,
) -> None:
    """Print the chart's values that follow from a configuration."""
    config = configuration.load(path)
    text = path.read_text(encoding="utf-8")
    sizes = _known_weights(config, path.parent) | dict(map(_size, weights or ()))
    print(values_file(text, derived_values(text, config, sizes)), end="")


@kube.command()
def env() -> None:
    """Print the environment of the chart's pods in mode rayservice."""
    print(environment_file(), end="")


@kube.command()
def prepare() -> None:
    """Make a pod's folders; the chart's pods run it ahead of Ray."""
    os.umask(0o077)
    prepare_pod()


def values_file(text: str, derived: dict[str, Any]) -> str:
    """The file of values with a configuration, as it is, and what follows from it."""
    body = "".join(f"  {line}\n" if line else "\n" for line in text.splitlines())
    rest = yaml.safe_dump({"mode": derived["mode"], "derived": derived}, sort_keys=False)
    end = "" if text.endswith("\n") else "-"
    return f"# Made by loomserve kube values; do not edit.\nconfig: |{end}\n{body}{rest}"


def environment_file() -> str:
    return "# Made by loomserve kube env; do not edit.\n" + yaml.safe_dump(
        pod_environment(), sort_keys=True
    )


def _known_weights(config: Config, base: Path) -> dict[str, int]:
    """Bytes of the weights that are on this machine; ConfigError: some are damaged."""
    models: list[Model | OfflineModel] = [*config.models, *config.offline_models]
    found = {model.name: _weights_here(model, base) for model in models}
    return {name: size for name, size in found.items() if size is not None}


def _weights_here(model: Model | OfflineModel, base: Path) -> int | None:
    # A folder may be the pods' own, and what is on the hub is not looked up.
    if catalog.folder_here(model.source, base) is None:
        return None
    found = catalog.resolve(model.source, base, lambda _: None, revision=model.revision)
    return catalog.known_weight_bytes(found)


def _size(given: str) -> tuple[str, int]:
    name, equals, size = given.rpartition("=")
    try:
        if not equals:
            raise ValueError("write MODEL=SIZE")
        return name, parse_bytes(size)
    except ValueError as error:
        raise ConfigError(f"--weights {given!r}: {error}") from None

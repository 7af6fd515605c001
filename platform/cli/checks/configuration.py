"""``loomserve config check``: what files alone can tell, and with ``--here`` the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from loomserve.platform.access.live_keys import read_keys, with_absolute_path
from loomserve.platform.adapters.sources import check_configured
from loomserve.platform.base.descriptors import raise_limit
from loomserve.platform.base.errors import ConfigError, LoomserveError
from loomserve.platform.cli.checks.machine import Check, machine_checks
from loomserve.platform.cli.checks.server import descriptors, sizes, warnings, with_absolute_files
from loomserve.platform.config import Config, Model
from loomserve.platform.devices.memory import gpus_of, is_on_gpus, replica_bytes
from loomserve.platform.engine.options.model_check import check_model, check_options
from loomserve.platform.lengths.stored import check_predictor
from loomserve.platform.models import catalog
from loomserve.platform.placement import model_files
from loomserve.platform.placement.own_placement import placed_here

Say = Callable[[str], None]


def check_configuration(config: Config, base: Path, say: Say) -> None:
    """Check models and keys without the machine; ConfigError: a line for each problem."""
    _all(_checks(config, base, say))


def check_here(config: Config, base: Path, say: Say) -> None:
    """Check that this machine can start it; ConfigError: a line for each problem."""
    _all(_checks_here(config, base, say))


def _all(checks: Iterator[Check]) -> None:
    problems = []
    for check in checks:
        try:
            check()
        except LoomserveError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _checks(config: Config, base: Path, say: Say) -> Iterator[Check]:
    yield lambda: read_keys(with_absolute_path(config.server, base))
    for model in config.models:
        yield partial(check_predictor, model)
        yield partial(check_options, model)
        yield partial(_check_files, config, model, base, say)
        yield partial(check_configured, model, base)


def _check_files(config: Config, model: Model, base: Path, say: Say) -> None:
    """Its own, if they are here: what is fetched on first use is checked then."""
    if not catalog.is_here(model.source):
        return
    folder = catalog.resolve(model.source, base, say, revision=model.revision)
    on_gpus = is_on_gpus(model, gpus_of(config.devices))
    check_model(model, folder, on_cpu=not on_gpus)
    if isinstance(folder, Path):
        _check_size(config, model, model_files.held_bytes(folder, model, on_gpus=on_gpus))


def _check_size(config: Config, model: Model, held_bytes: int) -> None:
    """Raises ConfigError if no device that it may be on has room for its weights and its KV."""
    devices = [config.device(name) for name in model.devices] or list(config.devices)
    gpus = gpus_of(config.devices)
    needed = replica_bytes(model, held_bytes, gpus) * model.largest_share
    on_own_cores = config.cluster is None and not any(each.name in gpus for each in devices)
    machine = psutil.virtual_memory().total if on_own_cores else None
    rooms = [each.memory or machine for each in devices] or [machine]
    # A model without devices is divided among several where none holds it.
    room = max((each or 0) for each in rooms) * (1 if model.is_placed else max(1, len(rooms)))
    if machine is not None:
        room = min(room, machine)
    if None not in rooms and needed > room:
        raise ConfigError(
            f"model {model.name!r} needs about {needed / 2**30:.1f} GiB, of which its weights are "
            f"{held_bytes / 2**30:.1f}, and there are {room / 2**30:.1f} on its devices: take a "
            "smaller or quantised one, or give it more memory"
        )


def _checks_here(config: Config, base: Path, say: Say) -> Iterator[Check]:
    raise_limit()
    yield lambda: with_absolute_files(config, base)
    yield from machine_checks(config, base)
    yield lambda: _tell(say, descriptors(config.server))
    _tell(say, sizes(config))
    if config.server.tls is None:
        _tell(say, warnings(config.server))
    if config.cluster is None and all(catalog.is_here(each.source) for each in config.models):
        yield lambda: _plan(config, base, say)


def _tell(say: Say, lines: Iterator[str]) -> None:
    for line in lines:
        say(line)


def _plan(config: Config, base: Path, say: Say) -> None:
    # It imports torch.
    from loomserve.deployments.planning import bytes_left_behind, plan

    plan(placed_here(config, base, say, bytes_left_behind(config)).counted, base, say)

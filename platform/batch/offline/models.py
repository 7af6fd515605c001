"""Fetches and checks offline models before the platform starts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.config import Config
from loomserve.platform.devices.memory import offline_bytes
from loomserve.platform.models import catalog


def check_offline_models(config: Config, base: Path, say: Callable[[str], None]) -> float:
    """Fetch and check all offline models, and return the bytes of memory that they will take.
    Raises ConfigError if a source is wrong, or transformers cannot run it in batches; StartError if
    a model cannot be fetched."""
    needed = 0.0
    for model in config.offline_models:
        source = catalog.resolve(model.source, base, progress=say, revision=model.revision)
        # A process of its own: transformers takes hundreds of megabytes, which this one would keep.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
            problem = apart.submit(_problem, str(source), model.revision).result()
        if problem is not None:
            raise problem.__class__(f"batch.offline_models, {model.name!r}: {problem}")
        weights = catalog.known_weight_bytes(source)
        needed += offline_bytes(model, weights)
    return needed


def _problem(source: str, revision: str | None) -> ConfigError | StartError | None:
    from loomserve.platform.batch.offline.executor import check

    try:
        check(source, revision)
    except ConfigError as error:
        return error
    except OSError as error:
        return StartError(f"{source} cannot be read: {error}")
    return None

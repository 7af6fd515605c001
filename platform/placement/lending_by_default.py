"""Which of the models that the platform places may lend to each other without saying so."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Lending, Model
from loomserve.platform.models import catalog


def with_lending(model: Model, base: Path) -> Model:
    """The model with ``lending: auto`` if it leaves ``lending`` out and nothing speaks against it.

    It must run on a CPU device that is not the only one. Replicas with roles hand their KV over to
    each other, and do not lend by themselves.

    Args:
        model: with its devices.
        base: folder to which its source is relative. A model that is not on this machine, of which
            nobody knows what attention it has, does not lend.
    """
    if "lending" in model.model_fields_set or model.roles is not None:
        return model
    try:
        folder = catalog.folder_here(model.source, base)
        if folder is None or not catalog.has_plain_attention(folder):
            return model
        lends = model.model_copy(update={"lending": Lending(auto=True)})
        # Its own checks know which options go with lending.
        Model.model_validate(lends.model_dump(exclude_unset=True))
    except (ConfigError, ValidationError):
        return model
    return lends

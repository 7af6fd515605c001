"""Adapters on their way from their sources to this node: found, checked, kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from loomserve.platform.adapters.files import KeptAdapter, find, keep
from loomserve.platform.adapters.peft import Shape, base_shapes, check_adapter
from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.config import AdapterSource, Model
from loomserve.platform.models import catalog
from loomserve.platform.models.remote import is_remote

T = TypeVar("T")


def take(model: Model, source: str, base: Path) -> KeptAdapter:
    """Find an adapter for a model, check it, and keep its files; it blocks.

    Args:
        model: which has ``adapters``.
        source: the adapter's.
        base: folder to which both sources are relative.

    Raises:
        ConfigError: there is no such adapter, or the model does not take it.
        StartError: it cannot be fetched.
    """
    assert model.adapters is not None
    return keep(find(source, base), model.adapters.max_lora_rank, _shapes(model, base))


def take_configured(model: Model, base: Path) -> list[tuple[AdapterSource, KeptAdapter]]:
    """All adapters that a model has from the start, as of :func:`take`; errors name the field."""
    return _each(model, lambda source: take(model, source, base))


def check_configured(model: Model, base: Path) -> None:
    """Check the adapters that a model has from the start, but for those that would be fetched.

    Raises:
        ConfigError: one is wrong; names the field.
    """
    shapes = _shapes(model, base) if model.adapter_names else None

    def check(source: str) -> None:
        if model.adapters is not None and not is_remote(source) and (base / source).parent.exists():
            check_adapter(find(source, base), model.adapters.max_lora_rank, shapes)

    _each(model, check)


def _each(model: Model, do: Callable[[str], T]) -> list[tuple[AdapterSource, T]]:
    done = []
    for index, one in enumerate(model.adapters.load if model.adapters is not None else ()):
        try:
            done.append((one, do(one.source)))
        except LoomserveError as error:
            field = f"adapters.load[{index}].source"
            raise type(error)(f"model {model.name!r}, {field}: {error}") from None
    return done


def _shapes(model: Model, base: Path) -> Mapping[str, Shape] | None:
    """The shapes of a model's tensors; None where its weights are not here."""
    try:
        copy = catalog.copy_of(model.source)
        if copy is not None and not copy.exists():
            return None
        path = catalog.resolve(model.source, base, _silent, revision=model.revision)
        return base_shapes(path if isinstance(path, Path) else _from_hub(path, model.revision))
    except (LoomserveError, OSError, ValueError):
        return None


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def _silent(_: str) -> None:
    pass

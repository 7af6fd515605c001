"""Weights from another node that has them, so that where they come from is read once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray

from loomserve.deployments.ray_node import living_nodes, own_node
from loomserve.platform.adapters.sources import kept_folder
from loomserve.platform.models.catalog import copy_of
from loomserve.platform.models.once import made_once
from loomserve.platform.nodes.resources import on_node

_log = logging.getLogger("ray.serve")

ADAPTER = "adapter:"
"""Begins what is asked for of an adapter, before the digest of its files."""

_CHUNK_BYTES = 8 * 2**20
# So many chunks are on their way; Ray's store, through which they pass, has little room.
_CHUNKS_AHEAD = 4
_LOOK_S = 30.0


def fetch_from_peers(source: str) -> None:
    """Copy a model that is fetched on first use, or an adapter, from a node that has it, if any."""
    folder = _folder_of(source)
    if folder is None or folder.exists() or not ray.is_initialized():
        return
    own = own_node()
    if own is None:
        return
    for peer in _nodes_that_have(source, own):
        try:
            made_once(folder, partial(copy_from, peer, source))
        except (ray.exceptions.RayError, OSError) as error:
            _log.warning("%s could not be copied from node %s: %s", source, peer, error)
        else:
            return


def _folder_of(source: str) -> Path | None:
    """Where a node keeps its copy; None: it keeps none."""
    if source.startswith(ADAPTER):
        return kept_folder(source.removeprefix(ADAPTER))
    return copy_of(source)


def copy_from(peer: str, source: str, partial_folder: Path) -> Path:
    """Copy a node's folder of a model; returns where to. Raises RayError or OSError."""
    to = partial_folder / "model"
    to.mkdir()
    sending = _send.options(
        resources=on_node(peer),
        num_returns="streaming",
        _generator_backpressure_num_objects=_CHUNKS_AHEAD,
    )
    for chunk in sending.remote(source):
        name, content = ray.get(chunk)
        path = to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content)
    if not any(to.iterdir()):
        raise FileNotFoundError(f"node {peer} has no such model any more")
    return to


def _nodes_that_have(source: str, own: str) -> list[str]:
    asked = {
        _has.options(resources=on_node(name)).remote(source): name
        for name in living_nodes()
        if name != own
    }
    if not asked:
        return []
    answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_S)
    for one in late:
        ray.cancel(one)
    return [asked[one] for one in answered if _says_yes(one)]


def _says_yes(answer: Any) -> bool:
    try:
        return bool(ray.get(answer))
    except ray.exceptions.RayError:  # its node has just gone
        return False


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _has(source: str) -> bool:
    folder = _folder_of(source)
    return folder is not None and folder.exists()


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _send(source: str) -> Iterator[tuple[str, bytes]]:
    """The files of a model's folder in pieces, each with its path in the folder."""
    folder = _folder_of(source)
    assert folder is not None
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        yield name, b""
        with path.open("rb") as file:
            while content := file.read(_CHUNK_BYTES):
                yield name, content

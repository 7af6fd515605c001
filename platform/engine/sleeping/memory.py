"""Memory that a sleeping CPU engine gives back: pages of KV, and weights that its files have.

Anonymous pages that are given back read as zeros, as they did when they were allocated, and take
memory again with the first write to each. So nothing has to be allocated or bound anew.

An engine keeps weights packed for its kernels, but embeddings and output heads, which it keeps as
the files have them, in its own type of numbers. So the memory of these can go while it sleeps: the
files' pages hold them, which all engines of a model share and the operating system may take.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_TABLES = re.compile(r"(embed_tokens|wte|word_embeddings|lm_head|embed_out)\.weight$")
_ROWS = 4096
"""Rows that are compared at once, of which there is a copy in the engine's type meanwhile."""


def give_back_pages(caches: Iterable[Any]) -> int:
    """Give back the pages of KV caches, all of which are zero from now on.

    ``caches`` are tensors on a CPU, or lists of such; several may share one allocation. A page that
    holds anything else, too, stays. Returns the bytes of the pages, whether or not they took
    memory; raises OSError if the operating system refuses.
    """
    storages = {each.untyped_storage().data_ptr(): each for each in _tensors(caches)}
    given = 0
    for begin, tensor in storages.items():
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (begin + tensor.untyped_storage().nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            if _LIBC.madvise(first, end - first, mmap.MADV_DONTNEED):
                error = ctypes.get_errno()
                raise OSError(error, "KV memory cannot be given back")
            given += end - first
    return given


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)


@dataclass(frozen=True)
class Table:
    """A tensor in a file that has a row for each word, of shape ``[words, width]``."""

    file: Path
    name: str
    words: int
    width: int


class RereadWeight:
    """Weights of one layer, the first rows of which a file has; the others are zero."""

    def __init__(self, weight: torch.Tensor, tables: Sequence[Table]) -> None:
        """``weight`` is ``[words, width]``; all that share its memory see it come and go.
        ``tables`` have as many words, or fewer; one of them may be the same."""
        self._weight = weight
        self._tables = tables
        self._held: _HeldTable | None = None

    @property
    def nbytes(self) -> int:
        return int(self._weight.nbytes)

    def drop(self) -> None:
        """Give its memory back, if a file still has the same numbers."""
        if self._held is None:
            self._held = self._same()
            if self._held is not None:
                give_back_pages([self._weight])

    def restore(self) -> None:
        """Have it again as it was; nothing happens if it has not been dropped. Raises RuntimeError
        if the file was written to meanwhile, so that nobody has these weights."""
        if self._held is None:
            return
        stored = self._held.read()
        self._weight[: stored.shape[0]].copy_(stored)
        self._held.close()
        self._held = None

    def _same(self) -> _HeldTable | None:
        for table in self._tables:
            try:
                held = _HeldTable(table)
            except OSError:
                continue
            try:
                if _are_same(self._weight, held.read()):
                    return held
            except (SafetensorError, OSError, RuntimeError):
                pass  # something else stands there by now
            held.close()
        return None


class _HeldTable:
    """A table whose file stays what it is, whatever its name comes to mean."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._descriptor = os.open(table.file, os.O_RDONLY)
        self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self) -> torch.Tensor:
        """The tensor in the file's own pages, which are mapped as long as it is used. Raises
        RuntimeError if the file has been written to."""
        if self._now() != self._stamp:
            raise RuntimeError(f"{self._table.file} was changed while an engine of it slept")
        with safe_open(f"/proc/self/fd/{self._descriptor}", framework="pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(self._table.name)
            return found

    def close(self) -> None:
        os.close(self._descriptor)


def reread_weights(model: torch.nn.Module, folder: Path) -> list[RereadWeight]:
    """The weights of a model that its files seem to have as they are. ``model`` is vLLM's, whose
    weights are loaded; they are read again only from local safetensors in its ``folder``."""
    tables = list(_tables(folder))
    found: dict[int, RereadWeight] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, VocabParallelEmbedding) or weight is None or weight.dim() != 2:
            continue
        words, width = weight.shape
        fitting = [each for each in tables if (each.width, each.words <= words) == (width, True)]
        if fitting and weight.is_contiguous():
            # Tied ones are one tensor.
            found[weight.data_ptr()] = RereadWeight(weight.data, fitting)
    return list(found.values())


def _tables(folder: Path) -> Iterator[Table]:
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                if _TABLES.search(name):
                    shape = tensors.get_slice(name).get_shape()
                    if len(shape) == 2:
                        yield Table(file, name, *shape)


def _are_same(weight: torch.Tensor, stored: torch.Tensor) -> bool:
    parts = zip(weight.split(_ROWS), stored.split(_ROWS), strict=False)
    return not weight[len(stored) :].any() and all(
        torch.equal(mine[: len(part)], part.to(weight.dtype)) for mine, part in parts
    )

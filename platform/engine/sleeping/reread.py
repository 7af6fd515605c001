"""Embeddings and output heads that a CPU engine reads again from its model's files.

All other weights an engine has only packed for its kernels; these it has as they are in the files,
in its own type of numbers. So their memory can go while it sleeps, and the files' pages, which all
engines of a model share and the operating system may take, hold them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from loomserve.platform.engine.sleeping.memory import give_back_pages

_TABLES = re.compile(r"(embed_tokens|wte|word_embeddings|lm_head|embed_out)\.weight$")
_ROWS = 4096
"""Rows that are compared at once, of which there is a copy in the engine's type meanwhile."""


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
        """
        Args:
            weight: of shape ``[words, width]``; whoever shares its memory sees it come and go.
            tables: of as many words, or fewer; one of them may be the same.
        """
        self._weight = weight
        self._tables = tables
        self._held: _HeldTable | None = None

    @property
    def nbytes(self) -> int:
        return int(self._weight.nbytes)

    def drop(self) -> None:
        """Give its memory back, if a file has the same numbers; it may be gone, or another's."""
        if self._held is None:
            self._held = self._same()
            if self._held is not None:
                give_back_pages([self._weight])

    def restore(self) -> None:
        """Have it again as it was; nothing happens if it has not been dropped.

        Raises:
            RuntimeError: the file was written to meanwhile, so that nobody has these weights.
        """
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
        """The tensor in the file's own pages, which are mapped as long as it is used.

        Raises:
            RuntimeError: the file has been written to.
        """
        if self._now() != self._stamp:
            raise RuntimeError(f"{self._table.file} was changed while an engine of it slept")
        with safe_open(f"/proc/self/fd/{self._descriptor}", framework="pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(self._table.name)
            return found

    def close(self) -> None:
        os.close(self._descriptor)


def reread_weights(model: torch.nn.Module, folder: Path) -> list[RereadWeight]:
    """The weights of a model that its files seem to have as they are.

    Args:
        model: vLLM's, whose weights are loaded.
        folder: its files'; weights are read again only from local safetensors.
    """
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

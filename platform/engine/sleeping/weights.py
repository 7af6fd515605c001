"""What of its weights a CPU engine does without while it sleeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loomserve.platform.engine.sleeping.packed import pack_on_use
from loomserve.platform.engine.sleeping.reread import reread_weights


class SleepingWeights:
    """Those of a model that can be made, or read, again."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        """
        Args:
            model: vLLM's, whose weights are loaded.
            folder: its files'; where it is none, nothing is read again.
        """
        self._packed = pack_on_use(model)
        self._reread = reread_weights(model, folder)

    @property
    def nbytes(self) -> int:
        """What it does without, as far as it is there."""
        packed = sum(each.nbytes for each in self._packed)
        return packed + sum(each.nbytes for each in self._reread)

    def drop(self) -> None:
        """Free it; nobody may compute with the model from now on."""
        for operator in self._packed:
            operator.drop()
        for weight in self._reread:
            weight.drop()

    def restore(self) -> None:
        """Have it again; what is packed comes with its next use.

        Raises:
            RuntimeError: the model's files were changed.
        """
        for weight in self._reread:
            weight.restore()


def dropped_bytes(worker: Any) -> int:
    """What a worker's sleep frees of its weights; called in the worker's process."""
    weights: SleepingWeights | None = getattr(worker, "sleeping_weights", None)
    return 0 if weights is None else weights.nbytes

"""Trains in a process of its own, at the lowest priority, so that a process that serves requests
neither imports scikit-learn nor loses a core to it.

``python -m loomserve.platform.lengths.training.retrain KIND TRAINING.npz HEAD.npz``
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.lengths.predict.head import Head
from loomserve.platform.lengths.predict.predictor import KINDS
from loomserve.platform.lengths.training.versions import TrainingSet

_LIMIT_S = 600.0


class TrainingError(LoomserveError):
    """A head could not be trained; the current version serves on."""


def in_own_process(kind: str, training: TrainingSet) -> Head:
    """Fit a head to the training set in a child process; blocks for seconds. Raises TrainingError
    if the process failed, or took longer than ten minutes."""
    with tempfile.TemporaryDirectory(prefix="loomserve-lengths-") as folder:
        given, made = Path(folder, "training.npz"), Path(folder, "head.npz")
        np.savez(given, allow_pickle=False, **vars(training))
        command = [sys.executable, "-m", __name__, kind, str(given), str(made)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise TrainingError(f"training took longer than {_LIMIT_S:.0f} s") from None
        if done.returncode:
            cause = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise TrainingError(f"training failed: {cause}")
        with np.load(made, allow_pickle=False) as file:
            return KINDS[kind].head.of({name: file[name] for name in file.files})


def _main(kind: str, given: str, made: str) -> None:
    os.nice(19)
    # Numpy's and scikit-learn's libraries read these as they load: training gets one core.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from loomserve.platform.lengths.training.fit import fit

    with np.load(given, allow_pickle=False) as file:
        head = fit(kind, file["rows"], file["tokens"], file["weights"])
    np.savez(made, allow_pickle=False, **head.arrays())


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""A predictor on disk: its versions, each with its training set; one of them is current."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.base.files import replacing
from loomserve.platform.lengths.predict.embedding import Floats
from loomserve.platform.lengths.predict.predictor import KINDS, Fitted

_FORMAT = 1
_KEPT = 5
_POINTER = "current"


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Features ``[samples, features]``, output tokens ``[samples]`` and weights ``[samples]``."""

    rows: Floats
    tokens: NDArray[np.int64]
    weights: NDArray[np.float64]


@dataclass(frozen=True)
class Version:
    """One trained state of a predictor; ``parent`` is the number of the version it replaced."""

    number: int
    parent: int | None
    fitted: Fitted
    training: TrainingSet

    @property
    def has_learnt(self) -> bool:
        return len(self.training.tokens) > 0


class PredictorVersions:
    """Folder of a predictor's versions, which one process at a time may write. Each change is one
    rename: a reader, or a crash, sees the state before or after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, fitted: Fitted, training: TrainingSet) -> Version:
        """Write a version and make it the current one. All but five old versions are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parent = self.current_number()
        version = Version(max(self._numbers(), default=0) + 1, parent, fitted, training)
        with replacing(self._path(version.number)) as new, new.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **_arrays(version))
            file.flush()
            os.fsync(file.fileno())
        self._point_to(version.number)
        for number in self._numbers()[:-_KEPT]:
            if number not in (version.number, parent):
                self._path(number).unlink(missing_ok=True)
        return version

    def current(self) -> Version | None:
        """The current version; None before the first was published. Raises as :meth:`read`."""
        number = self.current_number()
        return None if number is None else self.read(number)

    def roll_back(self, version: Version) -> Version:
        """Make the parent current again; ``version`` stays on disk until it is old. Raises
        ConfigError if there is no parent, or it cannot be read."""
        if version.parent is None:
            raise ConfigError(f"{self._path(version.number)} is the first version; train again")
        parent = self.read(version.parent)
        self._point_to(parent.number)
        return parent

    def read(self, number: int) -> Version:
        """Read a version. Raises ConfigError if it is missing, damaged, or of another release of
        the platform."""
        path = self._path(number)
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            return _version(number, arrays)
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{path} is no length predictor of this release ({error}); train one with "
                "loomserve lengths train"
            ) from None

    def current_number(self) -> int | None:
        """The number of the current version, of which nothing is read. Raises ConfigError if the
        file that names it is damaged."""
        path = self.folder / _POINTER
        try:
            return int(path.read_text(encoding="ascii"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); delete {self.folder} and train again"
            ) from None

    def _point_to(self, number: int) -> None:
        with replacing(self.folder / _POINTER) as new, new.open("w", encoding="ascii") as file:
            file.write(str(number))
            file.flush()
            os.fsync(file.fileno())

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.npz"

    def _numbers(self) -> list[int]:
        return sorted(int(p.stem) for p in self.folder.glob("*.npz") if p.stem.isdigit())


def _arrays(version: Version) -> dict[str, NDArray[Any]]:
    fitted, training = version.fitted, version.training
    about = {
        "format": _FORMAT,
        "parent": version.parent,
        "kind": fitted.kind,
        "margin": fitted.margin,
        "embeddings": fitted.embeddings,
    }
    arrays = {"about": np.array(json.dumps(about))}
    arrays |= {f"head.{name}": array for name, array in fitted.head.arrays().items()}
    return arrays | {f"training.{name}": array for name, array in vars(training).items()}


def _version(number: int, arrays: dict[str, NDArray[Any]]) -> Version:
    about = json.loads(str(arrays.pop("about")))
    if about["format"] != _FORMAT:
        raise ValueError(f"its format is {about['format']}, not {_FORMAT}")

    def part(prefix: str) -> dict[str, NDArray[Any]]:
        return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}

    head = KINDS[about["kind"]].head.of(part("head."))
    fitted = Fitted(about["kind"], head, float(about["margin"]), about["embeddings"])
    return Version(number, about["parent"], fitted, TrainingSet(**part("training.")))

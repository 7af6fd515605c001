"""Trained predictors by name: where they are, and whose embeddings they read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config import Model, OfflineModel
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.prediction import LengthQuery, Prediction
from loomserve.platform.lengths.training.learner import Learner
from loomserve.platform.lengths.training.versions import PredictorVersions

_EMBEDDINGS = "embeddings"


def folder_of(name: str) -> Path:
    """Where a predictor's versions are: ``lengths/NAME`` in the user's cache folder.

    Raises:
        ConfigError: the name would lead elsewhere.
    """
    if not name or name.startswith(".") or "/" in name:
        raise ConfigError(f"--name {name!r}: give a plain name, such as the served model's")
    return cache_folder() / "lengths" / name


def remember_embeddings(folder: Path, model: Path) -> None:
    """Keep whose embeddings the versions in ``folder`` are trained with: a model's folder."""
    (folder / _EMBEDDINGS).write_text(f"{model.absolute()}\n", encoding="utf-8")


@dataclass(frozen=True)
class StoredPredictor:
    """A predictor as it serves; one process at a time learns, any number may predict."""

    learner: Learner
    embeddings: TokenEmbeddings
    lock: FileLock

    def count(self, text: str) -> int:
        """Tokens of a text, as the predictor was trained to see them."""
        return self.embeddings.tokens(text)

    def predict(self, query: LengthQuery) -> Prediction:
        return self.learner.predict(query)

    def observe(self, query: LengthQuery, prediction: Prediction, tokens: int) -> None:
        self.learner.observe(query, prediction, tokens)

    def start(self) -> bool:
        """Learn in the background; False if another process learns for this predictor."""
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            return False
        self.learner.start()
        return True

    def close(self) -> None:
        self.learner.close()
        self.lock.release()


def open_predictor(name: str) -> StoredPredictor:
    """The current version of a name. Takes a moment, so not on an event loop.

    Raises:
        ConfigError: there is none, or what it needs is damaged or gone; says what to run.
    """
    folder = folder_of(name)
    again = f"run loomserve lengths train FILES --name {name}"
    versions = PredictorVersions(folder)
    version = versions.current()
    if version is None:
        raise ConfigError(f"there is no length predictor {name!r} in {folder.parent}: {again}")
    try:
        model = Path((folder / _EMBEDDINGS).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"length predictor {name!r} does not say whose embeddings it reads: {again}"
        ) from None
    if not model.is_dir():
        raise ConfigError(f"length predictor {name!r} reads {model}, which is gone: {again}")
    embeddings = TokenEmbeddings(model)
    lock = FileLock(folder / "learner.lock", thread_local=False)
    return StoredPredictor(Learner(versions, version, embeddings), embeddings, lock)


def check_predictor(model: Model | OfflineModel) -> None:
    """
    Raises:
        ConfigError: the model names a predictor that cannot be used.
    """
    if model.lengths is None:
        return
    try:
        open_predictor(model.lengths.predictor)
    except ConfigError as error:
        raise ConfigError(f"lengths.predictor of model {model.name!r}: {error}") from None

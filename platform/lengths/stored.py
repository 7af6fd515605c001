"""Finds a trained predictor by its name, with the embeddings that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config import Model, OfflineModel
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.head import EDGES, BucketClassifier, bucket_of
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.predictor import KINDS, Fitted
from loomserve.platform.lengths.training.learner import Learner
from loomserve.platform.lengths.training.versions import PredictorVersions, TrainingSet
from loomserve.platform.models import catalog

_EMBEDDINGS = "embeddings"
_EMBEDDINGS_OF = "demo"
"""The model whose embeddings an untrained predictor reads."""
KIND = "uellm"
"""For open questions the better of the two papers' (docs/lengths.md), and the faster to train."""
_TOKENS = 128.0
"""Guess for every answer that a trained predictor must beat; it is not reported."""


def folder_of(name: str) -> Path:
    """The folder of a predictor's versions: ``lengths/NAME`` in the user's cache folder. Raises
    ConfigError if the name leads to another folder."""
    if not name or name.startswith(".") or "/" in name:
        raise ConfigError(f"--name {name!r}: give a plain name, such as the served model's")
    return cache_folder() / "lengths" / name


def remember_embeddings(folder: Path, model: Path) -> None:
    """Record in ``folder`` the model folder whose embeddings its versions are trained with."""
    (folder / _EMBEDDINGS).write_text(f"{model.absolute()}\n", encoding="utf-8")


def open_predictor(name: str) -> Learner:
    """Open the current version of a predictor. It reads files: do not call it on an event loop.
    Raises ConfigError if there is none, or a file that it needs is damaged or gone."""
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
    return Learner(versions, version, TokenEmbeddings(model))


def untrained(embeddings: TokenEmbeddings) -> tuple[Fitted, TrainingSet]:
    """A predictor that guesses the same of every answer, and its empty training set."""
    features = len(KINDS[KIND].features(embeddings)(LengthQuery("", "", 0)))
    bucket = bucket_of([_TOKENS])
    head = BucketClassifier(
        centre=np.zeros(features, np.float32),
        scale=np.ones(features, np.float32),
        weights=np.zeros((features, 1), np.float32),
        bias=np.zeros(1, np.float32),
        buckets=bucket,
        means=EDGES[bucket],
    )
    training = TrainingSet(
        np.zeros((0, features), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float64)
    )
    return Fitted(KIND, head, 0.0, embeddings.digest), training


def begin_untrained(name: str) -> None:
    """Begin a predictor that has yet to learn everything, unless there is one of the name. Raises
    ConfigError if the model whose embeddings it reads cannot be had."""
    if _is_there(name):
        return
    try:
        model = catalog.resolve(_EMBEDDINGS_OF, Path())
    except (ConfigError, StartError) as error:
        raise ConfigError(
            f"one that needs no training reads the embeddings of the model {_EMBEDDINGS_OF}, which "
            f"is not there: {error}"
        ) from None
    assert isinstance(model, Path)
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    # First, so that whatever version is there can be opened.
    remember_embeddings(folder, model)
    PredictorVersions(folder).publish(*untrained(TokenEmbeddings(model)))


def prepare_predictor(model: Model | OfflineModel) -> None:
    """Begin the model's predictor if it needs no training, and check it."""
    if model.lengths is not None and model.lengths.predictor is None:
        with _of_model(model):
            begin_untrained(model.lengths.name_for(model.name))
    check_predictor(model)


def check_predictor(model: Model | OfflineModel) -> None:
    """Raises ``ConfigError`` if the model names a predictor that cannot be used."""
    lengths = model.lengths
    if lengths is None:
        return
    with _of_model(model):
        name = lengths.name_for(model.name)
        # One that needs no training is made when the model is loaded.
        if lengths.predictor is not None or _is_there(name):
            open_predictor(name)


def _is_there(name: str) -> bool:
    return PredictorVersions(folder_of(name)).current_number() is not None


@contextmanager
def _of_model(model: Model | OfflineModel) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"lengths.predictor of model {model.name!r}: {error}") from None

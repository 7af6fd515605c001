"""Lengths of prompts and answers in Magnus's tasks, from its data or in their likeness.

Translation, grammar correction, translation and fixing of code, and comments on code: in all but
the last, an answer is about as long as its input. Lengths are those of the reference answers in
cl100k tokens; a prompt is the task's instruction, a token a word, and the input.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.training import samples, split
from loomserve.platform.lengths.training.samples import Sample
from loomserve.platform.models import catalog

LONGEST_PROMPT = 288
LONGEST_ANSWER = 288
"""No row of the data is longer; what a server that predicts nothing has to expect."""

_FILES = ("magnus_codexglue.jsonl.gz", "magnus_jfleg.jsonl.gz")

_SERVED = 0
"""The fold whose predicted lengths are returned."""


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of a prompt and of its answer, and of the latter as predicted, if by anyone."""

    prompt: int
    answer: int
    predicted: int | None = None


Rows = Mapping[str, Sequence[Length]]
"""By task."""


@dataclass(frozen=True)
class TaskLikeness:
    """Of a task: its instruction's words, mean and deviation of the logarithm of the input's
    tokens, and the line with its deviation that the logarithm of the answer's tokens follows."""

    words: int
    input: tuple[float, float]
    intercept: float
    slope: float
    deviation: float


TASKS = {
    "MT_zh": TaskLikeness(8, (3.15, 0.61), -0.28, 0.90, 0.22),
    "MT_da": TaskLikeness(8, (3.14, 0.57), -0.33, 0.94, 0.19),
    "CT": TaskLikeness(7, (3.45, 0.69), 0.37, 0.95, 0.32),
    "BF": TaskLikeness(8, (4.25, 0.57), -0.23, 1.03, 0.28),
    "CC": TaskLikeness(10, (3.39, 0.72), 1.89, 0.18, 0.77),
    "GC": TaskLikeness(7, (2.85, 0.52), 0.09, 0.96, 0.13),
}
"""Fitted to CodeXGLUE (Lu et al. 2021) and JFLEG (Napoles et al. 2017)."""


def drawn(count: int, rows: Rows | None, seed: str) -> list[Length]:
    """So many lengths, each of a task drawn at random; of none, generated ones."""
    source = random.Random(seed)
    if rows is None:
        tasks = sorted(TASKS.items())
        return [_like(source.choice(tasks)[1], source) for _ in range(count)]
    lists = [lengths for _, lengths in sorted(rows.items())]
    return [source.choice(source.choice(lists)) for _ in range(count)]


def _like(task: TaskLikeness, source: random.Random) -> Length:
    tokens = max(1, round(source.lognormvariate(*task.input)))
    mean = task.intercept + task.slope * math.log(tokens)
    return _bounded(task.words + tokens, round(source.lognormvariate(mean, task.deviation)))


def _bounded(prompt: int, answer: int, predicted: int | None = None) -> Length:
    return Length(min(LONGEST_PROMPT, prompt), min(LONGEST_ANSWER, max(2, answer)), predicted)


def read(data: Path, *, predict: bool) -> Rows:
    """The data's lengths, and Magnus's predictions of them.

    The predictor is trained on the texts of four fifths of the requests; then only those of the
    last fifth are returned, none of them a near-duplicate of one that it knows.
    """
    folder = Path(catalog.resolve("demo", Path.cwd()))
    embeddings = TokenEmbeddings(folder)
    found = [one for file in _FILES for one in samples.read(data / file, embeddings.tokens)]
    rows = defaultdict(list)
    if not predict:
        for one in found:
            rows[one.task].append(_bounded(_prompt(one), one.tokens))
        return rows
    # scikit-learn takes seconds to import, which generated lengths need not spend.
    from loomserve.platform.lengths.training.evaluation import FOLDS, trained_without

    folds = [split.fold(one, FOLDS) for one in split.groups([one.query for one in found])]
    predictor = trained_without(_SERVED, "magnus", found, folds, embeddings)
    for one, fold in zip(found, folds, strict=True):
        if fold == _SERVED:
            predicted = round(predictor.predict(one.query).tokens)
            rows[one.task].append(_bounded(_prompt(one), one.tokens, predicted))
    return rows


def _prompt(sample: Sample) -> int:
    return len(sample.query.instruction.split()) + sample.query.input_tokens

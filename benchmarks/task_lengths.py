"""Lengths of prompts and answers in Magnus's tasks, from its data or in their likeness.

Translation, grammar correction, translation and fixing of code, and comments on code: in all but
the last, an answer is about as long as its input. Lengths are those of the reference answers in
cl100k tokens; a prompt is the task's instruction, a token a word, and the input.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

LONGEST_PROMPT = 288
LONGEST_ANSWER = 288
"""No row of the data is longer; what a server that predicts nothing has to expect."""

_FILES = ("magnus_codexglue.jsonl.gz", "magnus_jfleg.jsonl.gz")

Length = tuple[int, int]
"""Tokens of a prompt and of its answer."""


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


def drawn(count: int, data: Path | None, seed: str) -> list[Length]:
    """So many lengths, each of a task drawn at random."""
    source = random.Random(seed)
    if data is None:
        tasks = sorted(TASKS.items())
        found = [_like(source.choice(tasks)[1], source) for _ in range(count)]
    else:
        rows = sorted(_rows(data).items())
        found = [source.choice(source.choice(rows)[1]) for _ in range(count)]
    return [
        (min(LONGEST_PROMPT, prompt), min(LONGEST_ANSWER, max(2, answer)))
        for prompt, answer in found
    ]


def _like(task: TaskLikeness, source: random.Random) -> Length:
    tokens = max(1, round(source.lognormvariate(*task.input)))
    mean = task.intercept + task.slope * math.log(tokens)
    return task.words + tokens, round(source.lognormvariate(mean, task.deviation))


def _rows(data: Path) -> dict[str, list[Length]]:
    found = defaultdict(list)
    for file in _FILES:
        with gzip.open(data / file, "rt", encoding="utf-8") as lines:
            for row in map(json.loads, filter(str.strip, lines)):
                words = len(row["instruction"].split())
                found[row["task"]].append((words + row["in_tokens"], row["out_tokens"]))
    return found

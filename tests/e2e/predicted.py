"""A predictor of answers' lengths that a test can foresee: questions are short, stories long."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.load import WORDS
from loomserve.platform.lengths.stored import folder_of
from tests.e2e.conftest import LOOMSERVE

SHORT, LONG = 6, 60
_SAMPLES = 150


def question(number: int) -> str:
    return f"Answer with one word. Which of these is the odd one out: {_words(number)}?"


def story(number: int) -> str:
    return f"Write a long story, in which the following appear: {_words(number)}."


def _words(number: int) -> str:
    """Others for each, since what is nearly alike counts as one sample."""
    return ", ".join(random.Random(number).sample(WORDS, 12))


@contextmanager
def trained(folder: Path) -> Iterator[str]:
    """The name of a predictor trained by the command that users have, until the block ends."""
    samples = folder / "samples.jsonl"
    with samples.open("w") as out:
        for number in range(_SAMPLES):
            for text, tokens in ((question(number), SHORT), (story(number), LONG)):
                row = {"input": text, "out_tokens": tokens + number % 3, "in_tokens": 20}
                out.write(json.dumps(row) + "\n")
    name = f"test-{uuid.uuid4().hex[:8]}"
    command = [LOOMSERVE, "lengths", "train", str(samples)]
    try:
        subprocess.run([*command, "--name", name, "--kind", "uellm"], check=True)
        yield name
    finally:
        shutil.rmtree(folder_of(name), ignore_errors=True)

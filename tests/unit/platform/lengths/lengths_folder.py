"""A model folder small enough for a test: words as tokens, and random embeddings."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.training.samples import Sample

# No digits in words: texts that differ in numbers alone are near-duplicates.
_LETTERS = str.maketrans("0123456789", "abcdefghij")
_NOUNS = [f"w{number}".translate(_LETTERS) for number in range(200)]
WORDS = ("<unk>", "translate", "summarise", "this", "list", *_NOUNS)
DIMENSIONS = 32


def table() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(len(WORDS), DIMENSIONS)).astype(np.float32)


def make(folder: Path) -> Path:
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file({"model.embed_tokens.weight": table()}, folder / "model.safetensors")
    return folder


def samples(number: int, factor: float = 1.0, seed: int = 0) -> list[Sample]:
    """Translations as long as their input, and lists of about 150 tokens, times ``factor``."""
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        words = rng.randint(5, 80)
        text = " ".join(rng.choices(_NOUNS, k=words))
        if rng.random() < 0.5:
            query = LengthQuery("translate this", text, words + 2)
            tokens = words * rng.uniform(0.95, 1.05)
        else:
            query = LengthQuery("list this", text, words + 2)
            tokens = rng.lognormvariate(5, 0.3)
        made.append(Sample(query.instruction, query, round(factor * tokens)))
    return made

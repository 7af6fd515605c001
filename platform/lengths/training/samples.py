"""Reads requests and the lengths of their answers from JSON lines, and splits them in folds."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict.prediction import LengthQuery

FOLDS = 5
_COLUMNS = (
    "instruction and input (text, one may be missing), out_tokens; optionally in_tokens, task"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A request and the tokens of its answer; scores are reported by ``task``."""

    task: str
    query: LengthQuery
    tokens: int


def read(path: Path, count: Callable[[str], int], model: str | None = None) -> list[Sample]:
    """The samples of a file of JSON lines, plain or gzipped. Columns: ``instruction`` (the
    application's text) and ``input`` (the user's), of which one may be missing; ``out_tokens``, a
    number, or an object with a number for each model, of which ``model`` is taken; ``in_tokens``,
    by default the tokens that ``count`` finds in both texts; ``task``, by default the file's name.
    Lists ``instructions`` and ``out_tokens`` of equal length are several requests on one ``input``.
    Other columns are ignored. Raises ConfigError if the file cannot be read, or a line lacks a
    column."""
    opened = gzip.open if path.suffix == ".gz" else open
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    samples: list[Sample] = []
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        samples += _samples(json.loads(line), name, count, model)
                    except (ValueError, TypeError, AttributeError) as error:
                        raise ConfigError(f"{path}, line {number}: {error}") from None
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not samples:
        raise ConfigError(f"{path} has no line; a line is a JSON object with {_COLUMNS}")
    return samples


def _samples(
    row: dict[str, Any], name: str, count: Callable[[str], int], model: str | None
) -> Iterator[Sample]:
    several = row.get("instructions")
    lengths = row.get("out_tokens")
    if isinstance(lengths, dict):
        if model not in lengths:
            raise ValueError(
                f"out_tokens is given for several models; choose one with --model: "
                f"{', '.join(lengths)}"
            )
        lengths = lengths[model]
        name = f"{name}:{model}"
    if several is None:
        several, lengths = [row.get("instruction", "")], [lengths]
    if not isinstance(lengths, list) or len(several) != len(lengths):
        raise ValueError("instructions and out_tokens must be lists of equal length")
    given = row.get("in_tokens")
    for instruction, tokens in zip(several, lengths, strict=True):
        query = _query(instruction, row.get("input", ""), given, count)
        yield Sample(str(row.get("task", name)), query, _whole("out_tokens", tokens))


def _query(
    instruction: Any, user_input: Any, given: Any, count: Callable[[str], int]
) -> LengthQuery:
    if not isinstance(instruction, str) or not isinstance(user_input, str):
        raise ValueError("instruction and input must be text")
    if not instruction and not user_input:
        raise ValueError(f"has no text to predict from; needed are {_COLUMNS}")
    if given is None:
        given = count(instruction) + count(user_input)
    return LengthQuery(instruction, user_input, _whole("in_tokens", given))


def _whole(column: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{column} must be a whole number of tokens, not {value!r}")
    return value


def read_all(
    paths: Sequence[Path], count: Callable[[str], int], model: str | None = None
) -> list[Sample]:
    return [sample for path in paths for sample in read(path, count, model)]


# Two texts are near-duplicates if they share at least half of their distinct word triples.
_ALIKE = 0.5
_CHARACTERS = 4000
_WORDS = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+")


def normalised(text: str) -> str:
    """The text in lower case, words only, every number 0."""
    return " ".join(_WORDS.findall(_DIGITS.sub("0", text[:_CHARACTERS].lower())))


def groups(queries: Sequence[LengthQuery]) -> list[str]:
    """For each query, the name of its group of near-duplicates, a digest of the group's first text.
    Queries that share an instruction are compared by their inputs only. Groups are closed: a text
    that is alike to one of a group belongs to it."""
    shared = Counter(query.instruction for query in queries)
    texts = [
        normalised(
            query.user_input
            if query.user_input and shared[query.instruction] > 1
            else f"{query.instruction} {query.user_input}"
        )
        for query in queries
    ]
    unique = sorted(set(texts))
    leader = _leaders([_triples(text) for text in unique])
    first = {text: unique[leader[index]] for index, text in enumerate(unique)}
    return [hashlib.sha256(first[text].encode()).hexdigest() for text in texts]


def fold(group: str, folds: int) -> int:
    """The fold of a group, from its digest; the same in every run and for any order of samples."""
    return int(group[:12], 16) % folds


def _triples(text: str) -> frozenset[int]:
    words = text.split()
    if len(words) < 3:
        return frozenset({hash(text)})
    return frozenset(hash(triple) for triple in zip(words, words[1:], words[2:], strict=False))


def _leaders(sets: Sequence[frozenset[int]]) -> list[int]:
    """For each set, the smallest index in its group."""
    leader = list(range(len(sets)))

    def root(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    holders: dict[int, list[int]] = defaultdict(list)
    for index, triples in enumerate(sets):
        common: Counter[int] = Counter()
        for triple in triples:
            common.update(holders[triple])
            holders[triple].append(index)
        for other, count in common.items():
            if count >= _ALIKE * (len(triples) + len(sets[other]) - count):
                low, high = sorted((root(index), root(other)))
                leader[high] = low
    return [root(index) for index in range(len(sets))]


def folds_of(samples: Sequence[Sample]) -> list[int]:
    """The fold of each sample, below :data:`FOLDS`; near-duplicates share theirs."""
    return [fold(group, FOLDS) for group in groups([sample.query for sample in samples])]

"""Splits samples so that near-duplicates are never both in training and in the test.

Requests that differ in a name or a number have nearly the same answer; a split by line would put
one into training and the other into the test, and so measure memory.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from loomserve.platform.lengths.predict.prediction import LengthQuery

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
    that is alike to one of a group belongs to it.
    """
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

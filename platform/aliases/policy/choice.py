"""Chooses one of an alias's models by weight: at random, or the same one for the same client."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping

# Bits of a hash of which a float holds each exactly, and the half that is added.
_BITS = 52


def present(
    weights: Mapping[str, int], standings: Iterable[Callable[[str], bool]]
) -> dict[str, int]:
    """The models to choose from: those of weight above 0 with the best standing that any has.
    ``standings``: predicates, the best first; models for which none holds are left out."""
    wanted = {model: weight for model, weight in weights.items() if weight > 0}
    for holds in standings:
        if found := {model: weight for model, weight in wanted.items() if holds(model)}:
            return found
    return {}


def by_number(weights: Mapping[str, int], number: float) -> str:
    """The model at ``number``, from 0 up to but not 1, of the weights laid end to end."""
    at = number * sum(weights.values())
    for model, weight in weights.items():
        at -= weight
        if at < 0:
            return model
    # Rounding may have left a rest.
    return max(weights, key=lambda model: weights[model])


def by_client(weights: Mapping[str, int], alias: str, client: str) -> str:
    """The model of a client: the same one, as long as weights stay as they are.

    Weighted rendezvous hashing: each model draws a time for the client, exponential with its weight
    as the rate; the first one has it. A model whose weight grows takes clients from others in
    proportion and gives none away; other aliases split the same clients otherwise.
    """
    return min(
        (model for model, weight in weights.items() if weight > 0),
        key=lambda model: (-math.log(_uniform(alias, client, model)) / weights[model], model),
    )


def _uniform(*names: str) -> float:
    """A number above 0 and below 1 that looks random, the same for the same names."""
    hashed = hashlib.blake2b(digest_size=8)
    for name in names:
        # With their lengths, so that no two lists of names are one text.
        encoded = name.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "big"))
        hashed.update(encoded)
    drawn = int.from_bytes(hashed.digest(), "big") >> (64 - _BITS)
    return math.ldexp(drawn + 0.5, -_BITS)

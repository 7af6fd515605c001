"""Which model of an alias a request gets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loomserve.platform.aliases.policy.choice import by_client, by_number, present

CLIENTS = [f"key-{number}" for number in range(4000)]
WEIGHTS = st.dictionaries(
    st.sampled_from("abcdef"), st.integers(0, 1000), min_size=1, max_size=6
).filter(lambda weights: any(weights.values()))


def spread(weights: dict[str, int], clients: list[str] = CLIENTS) -> dict[str, str]:
    return {client: by_client(weights, "chat", client) for client in clients}


@given(WEIGHTS, st.floats(0, 1, exclude_max=True))
@example({"a": 1, "b": 0}, math.nextafter(1, 0))
@example({"b": 0, "a": 1}, 0.0)
def test_a_number_and_a_client_give_a_model_that_has_a_weight(
    weights: dict[str, int], number: float
) -> None:
    assert weights[by_number(weights, number)] > 0
    assert weights[by_client(weights, "chat", str(number))] > 0


@given(WEIGHTS)
def test_evenly_spread_numbers_are_split_exactly_by_weight(weights: dict[str, int]) -> None:
    total = sum(weights.values())
    # The middle of each unit of weight, so that no rounding decides.
    counted = Counter(by_number(weights, (unit + 0.5) / total) for unit in range(total))
    assert counted == {model: weight for model, weight in weights.items() if weight}


@pytest.mark.parametrize(
    "weights", [{"a": 95, "b": 5}, {"a": 1, "b": 1}, {"a": 3, "b": 2, "c": 1}, {"a": 1, "b": 0}]
)
def test_clients_are_split_by_weight(weights: dict[str, int]) -> None:
    counted = Counter(spread(weights).values())
    for model, weight in weights.items():
        share = weight / sum(weights.values())
        # Five standard deviations of as many independent draws.
        within = 5 * math.sqrt(len(CLIENTS) * share * (1 - share))
        assert abs(counted[model] - len(CLIENTS) * share) <= within


@settings(max_examples=50)
@given(WEIGHTS, st.text(max_size=20), st.text(max_size=20))
def test_a_client_keeps_its_model_whatever_order_the_weights_have(
    weights: dict[str, int], alias: str, client: str
) -> None:
    backwards = dict(reversed(weights.items()))
    assert by_client(weights, alias, client) == by_client(backwards, alias, client)


@settings(max_examples=30)
@given(WEIGHTS, st.sampled_from("abcdef"), st.integers(0, 1000))
def test_only_clients_that_must_move_do_when_a_weight_changes(
    weights: dict[str, int], model: str, weight: int
) -> None:
    changed = {**weights, model: weight}
    if not any(changed.values()):
        return
    grew = weight > weights.get(model, 0)
    clients = CLIENTS[:300]
    before, after = spread(weights, clients), spread(changed, clients)
    for client in clients:
        if before[client] != after[client]:
            assert (after if grew else before)[client] == model


def test_as_few_clients_move_as_the_shares_differ() -> None:
    before, after = spread({"a": 95, "b": 5}), spread({"a": 90, "b": 10})
    moved = sum(before[client] != after[client] for client in CLIENTS)
    # The least is the difference of the shares, a twentieth.
    assert abs(moved - 0.05 * len(CLIENTS)) <= 5 * math.sqrt(len(CLIENTS) * 0.05 * 0.95)


def test_the_weights_of_another_scale_move_nobody() -> None:
    assert spread({"a": 95, "b": 5}) == spread({"a": 950, "b": 50})


def test_a_model_that_is_gone_moves_its_own_clients_only() -> None:
    before, after = spread({"a": 2, "b": 1, "c": 1}), spread({"a": 2, "c": 1})
    assert all(after[client] == model for client, model in before.items() if model != "b")


def test_another_alias_splits_the_same_clients_otherwise() -> None:
    weights = {"a": 1, "b": 1}
    both = sum(by_client(weights, "x", c) == by_client(weights, "y", c) for c in CLIENTS)
    assert abs(both - len(CLIENTS) / 2) <= 5 * math.sqrt(len(CLIENTS) / 4)


def test_a_client_is_hashed_alike_in_every_process_and_version() -> None:
    # A gateway that is started anew, or another one, must choose as this one does.
    seen = [by_client({"a": 1, "b": 1}, "chat", f"key-{number}") for number in range(16)]
    assert "".join(seen) == "bbbbaaaaabababaa"


@pytest.mark.parametrize(
    ("standings", "found"),
    [
        ([lambda _: True], {"a": 2, "b": 1}),
        ([lambda model: model == "b"], {"b": 1}),
        ([lambda model: model == "c", lambda _: True], {"a": 2, "b": 1}),
        ([lambda model: model == "zero"], {}),
        ([], {}),
    ],
)
def test_the_models_of_the_best_standing_are_there(
    standings: list[Callable[[str], bool]], found: dict[str, int]
) -> None:
    assert present({"a": 2, "b": 1, "zero": 0}, standings) == found

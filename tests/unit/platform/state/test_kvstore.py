"""The state of several nodes' stores as one."""

from __future__ import annotations

from loomserve.platform.state import KvModelState, KvState
from loomserve.platform.state.kvstore import together


def model(name: str, count: int) -> KvModelState:
    counts = dict.fromkeys(KvModelState.model_fields.keys() - {"model"}, count)
    return KvModelState(model=name, **counts)


def store(count: int, *models: KvModelState) -> KvState:
    numbers = KvState.model_fields.keys() - {"models", "network", "nodes"}
    return KvState(**dict.fromkeys(numbers, count), models=models)


def test_the_only_store_is_shown_as_it_is() -> None:
    assert together({"": store(3, model("a", 1))}) == store(3, model("a", 1))


def test_stores_of_several_nodes_are_summed_by_model_and_shown_each() -> None:
    one, two = store(3, model("a", 1), model("b", 2)), store(4, model("b", 5))
    both = together({"two": two, "one": one})
    assert list(both.nodes.items()) == [("one", one), ("two", two)]
    assert both.model_copy(update={"nodes": {}}) == store(7, model("a", 1), model("b", 7))


def test_one_node_of_several_is_shown_under_its_name() -> None:
    assert together({"one": store(3)}).nodes == {"one": store(3)}

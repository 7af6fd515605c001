"""Which adapters there are, as operators load, replace and unload them."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.platform.adapters.messages import Adapter
from loomserve.platform.adapters.table import AdapterTable
from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.config import Model

LEAVE_S = 60.0


def model(name: str = "m", **adapters: Any) -> Model:
    return Model(name=name, source="demo", devices=("core0",), adapters=adapters)


def put(table: AdapterTable, name: str, digest: str, now: float = 0, of: str = "m") -> Adapter:
    adapter = table.try_out(of, name, f"folder/{name}", digest, 8)
    assert adapter is not None
    table.put(adapter, now)
    return adapter


def test_another_adapter_has_another_number_and_key_also_under_one_name() -> None:
    table = AdapterTable(LEAVE_S)
    first = put(table, "sql", "d1")
    second = put(table, "sql", "d2")
    third = put(table, "sql", "d1")
    assert len({each.id for each in (first, second, third)}) == 3
    assert first.key == third.key != second.key
    assert table.of("m") == (third,)


def test_the_one_that_it_has_is_not_loaded_again() -> None:
    table = AdapterTable(LEAVE_S)
    first = put(table, "sql", "d1")
    assert table.try_out("m", "sql", "moved", "d1", 8) is None
    assert table.of("m") == (first.model_copy(update={"source": "moved"}),)


def test_what_is_replaced_or_unloaded_stays_with_engines_for_a_while() -> None:
    table = AdapterTable(LEAVE_S)
    first, other = put(table, "sql", "d1"), put(table, "chat", "d1")
    second = put(table, "sql", "d2", now=100)
    table.delete("m", "chat", 110)
    assert "chat" not in table
    assert table.wanted("m", 150) == (second, first, other)
    assert table.leaving("m", 150) == (first, other)
    assert table.wanted("m", 100 + LEAVE_S) == (second, other)
    assert table.wanted("m", 110 + LEAVE_S) == (second,)
    with pytest.raises(NotFound, match="no adapter 'chat'; its adapters are: sql"):
        table.delete("m", "chat", 200)


def test_engines_get_one_that_is_tried_and_clients_do_not() -> None:
    table = AdapterTable(LEAVE_S)
    before = put(table, "sql", "d1")
    tried = table.try_out("m", "sql", "folder", "d2", 8)
    assert table.wanted("m", 0) == (before, tried)
    assert table.wanted("other", 0) == ()
    assert table.of("m") == (before,)
    table.give_up()
    assert table.wanted("m", 0) == (before,)


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        (Model(name="m", source="demo", devices=("core0",)), "new", "takes no adapters"),
        (model("n"), "sql", "an adapter of model 'm' is named 'sql' already"),
        (model(), "chat", "an alias is named 'chat' already"),
        (model(max_loras=1, max_cpu_loras=1), "new", "as many as its adapters.max_cpu_loras"),
    ],
)
def test_a_name_or_a_model_that_cannot_be_is_refused(given: Model, name: str, words: str) -> None:
    table = AdapterTable(LEAVE_S)
    put(table, "sql", "d1")
    with pytest.raises(Conflict) as error:
        table.check(given, name, {"chat": "an alias"}, 0)
    assert words in str(error.value)
    assert error.value.param in ("name", "model")


def test_engines_keep_room_for_what_leaves() -> None:
    table, one = AdapterTable(LEAVE_S), model(max_loras=1, max_cpu_loras=1)
    put(table, "sql", "d1")
    table.check(one, "sql", {}, 0)
    put(table, "sql", "d2", now=10)
    with pytest.raises(Conflict, match="try again shortly"):
        table.check(one, "sql", {}, 20)
    table.check(one, "sql", {}, 10 + LEAVE_S)


def test_the_next_controller_has_them_all_and_gives_no_number_twice() -> None:
    table = AdapterTable(LEAVE_S)
    put(table, "sql", "d1")
    second, gone = put(table, "sql", "d2", now=5), put(table, "gone", "d3")
    table.delete("m", "gone", 6)
    again = AdapterTable(LEAVE_S)
    again.restore(table.wishes, table.last_id)
    assert again.wishes == table.wishes
    assert again.of("m") == (second,)
    assert put(again, "new", "d4").id == gone.id + 1


def test_a_model_that_is_gone_takes_its_adapters_along() -> None:
    table = AdapterTable(LEAVE_S)
    put(table, "sql", "d1")
    put(table, "sql", "d2")
    kept = put(table, "other", "d1", of="n")
    table.note_problem("m", "broken", "folder", "it is missing")
    table.forget("m")
    assert (table.wanted("m", 0), table.problems("m")) == ((), {})
    assert table.names == (kept.name,)
    with pytest.raises(Conflict, match="'other' is an adapter of model 'n'"):
        table.check_free(["new", "other"])


def test_what_a_model_did_not_get_is_told_until_it_gets_it() -> None:
    table = AdapterTable(LEAVE_S)
    table.note_problem("m", "sql", "folder", "it is missing")
    assert table.problems("m") == {"sql": ("folder", "it is missing")}
    put(table, "sql", "d1")
    assert table.problems("m") == {}

"""Aliases as operators change them, and what they cannot be changed to."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.platform.aliases.table import AliasTable
from loomserve.platform.base.errors import BadRequest, Conflict, NotFound, RequestError
from loomserve.platform.config import Alias

LOADED = ("a", "b", "org/c")
SPLIT = Alias(models={"a": 95, "b": 5})


def table() -> AliasTable:
    return AliasTable({"chat": SPLIT}, models=("a", "away"), batch_only=("old",))


@pytest.mark.parametrize(
    "given",
    [
        "org/c",
        {"a": 1, "b": 0},
        {"models": {"a": 1}, "sticky": "key"},
        # It may come back.
        {"a": 95, "away": 5},
    ],
)
def test_what_an_alias_stands_for_can_be_changed(given: Any) -> None:
    changed, alias = table(), Alias.model_validate(given)
    for name in ("chat", "org/new"):
        changed.put(name, alias, LOADED)
        assert changed.all[name] == alias
    assert [state.name for state in changed.states] == ["chat", "org/new"]


@pytest.mark.parametrize(
    ("name", "given", "error", "says", "param"),
    [
        ("a", "b", Conflict, "a model is named 'a'", "name"),
        ("away", "b", Conflict, "a model is named 'away'", "name"),
        ("org/c", "b", Conflict, "a model is named 'org/c'", "name"),
        ("old", "b", Conflict, "a model is named 'old'", "name"),
        ("bad name", "a", BadRequest, "no name", "name"),
        ("new", "x", BadRequest, "no model 'x'; models: a, away, b, org/c", "models.x"),
        ("new", {"a": 1, "chat": 1}, BadRequest, "'chat' is an alias", "models.chat"),
        ("new", {"new": 1}, BadRequest, "'new' is an alias", "models.new"),
        ("chat", {"a": 1, "old": 1}, BadRequest, "answers batches only", "models.old"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    name: str, given: Any, error: type[RequestError], says: str, param: str
) -> None:
    same = table()
    with pytest.raises(error, match=says) as refused:
        same.put(name, Alias.model_validate(given), LOADED)
    assert refused.value.param == param
    assert same.all == {"chat": SPLIT}


def test_a_model_that_an_alias_has_may_be_away_while_its_weight_changes() -> None:
    changed = table()
    changed.put("chat", Alias(models={"a": 50, "b": 50}), loaded=("a",))
    assert changed.all["chat"].models == {"a": 50, "b": 50}


def test_an_alias_that_is_deleted_is_gone_and_its_name_is_free() -> None:
    changed = table()
    with pytest.raises(Conflict, match="'chat' is an alias"):
        changed.check_model_name("chat")
    changed.delete("chat")
    changed.check_model_name("chat")
    assert changed.all == {}
    with pytest.raises(NotFound, match=r"no alias 'chat'; the aliases are: none"):
        changed.delete("chat")


def test_all_of_an_earlier_table_is_taken_over_deletions_too() -> None:
    changed = table()
    changed.restore({"new": SPLIT})
    assert changed.all == {"new": SPLIT}

"""Signatures of owners: good for one request, one token and a short time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.errors import Forbidden
from loomserve.platform.batch.http.identity import FRESH_S, owner_of, sign

NOW_S = 1000.0


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["GET", "POST"]),
    st.text(),
    st.floats(-FRESH_S + 0.01, FRESH_S - 0.01),
)
def test_an_owner_is_read_as_it_was_signed(
    owner: str, method: str, target: str, later_s: float
) -> None:
    field = sign("token", owner, method, target, NOW_S)
    assert owner_of("token", field, method, target, NOW_S + later_s) == owner


@pytest.mark.parametrize(
    ("token", "method", "target", "now_s"),
    [
        ("other", "GET", "/v1/files", NOW_S),
        ("token", "HEAD", "/v1/files", NOW_S),
        ("token", "GET", "/v1/files?", NOW_S),
        ("token", "GET", "/v1/batches", NOW_S),
        ("token", "GET", "/v1/files", NOW_S + FRESH_S + 0.1),
        ("token", "GET", "/v1/files", NOW_S - FRESH_S - 0.1),
    ],
)
def test_a_signature_is_for_nothing_else(
    token: str, method: str, target: str, now_s: float
) -> None:
    field = sign("token", "alice", "GET", "/v1/files", NOW_S)
    with pytest.raises(Forbidden):
        owner_of(token, field, method, target, now_s)


@given(st.text(), st.integers(0, 200))
def test_what_is_written_by_others_or_changed_is_refused(text: str, place: int) -> None:
    with pytest.raises(Forbidden):
        owner_of("token", text, "GET", "/v1/files", NOW_S)
    field = sign("token", "alice", "GET", "/v1/files", NOW_S)
    place %= len(field)
    changed = field[:place] + ("0" if field[place] != "0" else "1") + field[place + 1 :]
    with pytest.raises(Forbidden):
        owner_of("token", changed, "GET", "/v1/files", NOW_S)

"""An order of rows is that of their last keys, whatever was put, dropped and looked at before."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from loomserve.routers.base import Columns, Order, Orders


@pytest.mark.parametrize("rows", [1, 5, 300, 2_000])
def test_an_order_is_that_of_sorted_keys(rows: int) -> None:
    rng = random.Random(rows)
    last = {row: (rng.random(), 0, row) for row in range(0, rows, 2)}
    order = Order(last.values())
    for _ in range(400):
        for _ in range(rng.randrange(8)):
            row = rng.randrange(rows)
            if rng.random() < 0.2:
                order.drop(row)
                last.pop(row, None)
            else:
                # Few figures, so that many are equal, and often those of the first ones.
                low = min(last.values(), default=(0.0, 0, 0))[0]
                key = rng.choice([rng.choice([0.25, 0.5]), rng.random(), low + rng.random() / 100])
                last[row] = key, rng.randrange(3), row
                order.put(row, *last[row][:2])
        most = rng.choice([1, 1, 1, 8, 100, rows])
        assert list(islice(order, most)) == sorted(last.values())[:most]
        row = rng.randrange(rows)
        assert order.now.get(row) == last.get(row)


def test_a_row_that_changes_for_ever_takes_no_more_memory() -> None:
    order = Order((1.0, 0, row) for row in range(10))
    for turn in range(10_000):
        order.put(turn % 10, 2.0 - turn % 7 / 10, turn)
        assert len(order._rest) <= 4 * 10 + 64
    assert len(list(order)) == 10


def test_two_may_go_through_an_order_at_once() -> None:
    order = Order((float(row), 0, row) for row in range(100))
    both = list(zip(order, islice(order, 50), strict=False))
    assert [one[2] for one, _ in both] == [other[2] for _, other in both] == list(range(50))


def test_orders_are_made_as_they_are_asked_for_and_kept_from_then_on() -> None:
    rng, columns = random.Random(0), Columns(50)
    orders = Orders(columns)
    for turn in range(2_000):
        row = rng.randrange(50)
        if rng.random() < 0.2:
            columns.known[row] = not columns.known[row]
            orders.drop(row)
        columns.answering[row] = rng.random() < 0.9
        columns.utilisation[row], columns.queue_length[row] = rng.random(), rng.randrange(5)
        if columns.answering[row]:
            orders.put(
                row,
                float(columns.utilisation[row]),
                int(columns.queue_length[row]),
                known=bool(columns.known[row]),
            )
        else:
            orders.drop(row)
        if turn < 200 or turn % 7:
            continue
        keys = [
            (columns.utilisation[row], columns.queue_length[row], row)
            for row in range(50)
            if columns.answering[row]
        ]
        by_load = sorted(keys, key=lambda key: (not columns.known[key[2]], *key))
        assert [*orders.get(True), *orders.get(False)] == by_load
        if turn > 900:
            by_queue = sorted((length, load, row) for load, length, row in keys)
            assert list(orders.get(None)) == by_queue

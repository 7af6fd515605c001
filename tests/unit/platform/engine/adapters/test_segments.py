"""Adapters of a batch on a CPU, against a product for each row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.engine.adapters import segments
from loomserve.platform.engine.adapters.segments import SegmentedAdapters, spans

PLACES, RANK, WIDE, TALL, VOCABULARY = 3, 4, 6, 5, 11
IDS = [10, 20, 30]


@given(st.lists(st.integers(-1, 2), max_size=12))
def test_spans_have_each_row_with_an_adapter_once(places: list[int]) -> None:
    found = spans(places)
    rows = {row: place for start, end, place in found for row in range(start, end)}
    assert rows == {row: place for row, place in enumerate(places) if place >= 0}
    assert sum(end - start for start, end, _ in found) == len(rows)


def wrapper(tokens: list[int], sampled: list[int]) -> Any:
    """For rows of tokens, and of those that are sampled, each with an adapter's id or 0."""
    made = SegmentedAdapters(32, 32, torch.device("cpu"))
    mapping = SimpleNamespace(index_mapping=tokens, prompt_mapping=sampled, is_prefill=True)
    made.update_metadata(mapping, IDS, PLACES + 1, VOCABULARY)
    return made


def stack(*shape: int) -> torch.Tensor:
    return torch.randn(PLACES, 1, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_row(x: torch.Tensor, ids: list[int], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What is added to each row."""
    added = torch.zeros(len(ids), b.shape[2])
    for row, number in enumerate(ids):
        if number:
            place = IDS.index(number)
            added[row] = b[place, 0] @ (a[place, 0] @ x[row])
    return added


@pytest.mark.parametrize(
    "ids",
    [
        # vLLM's own has the third place's for rows without any.
        [0, 10, 30],
        [0, 0, 0],
        [20, 20, 0, 20, 10],
        [30],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_its_own_adapter_and_others_nothing(
    ids: list[int], dtype: torch.dtype
) -> None:
    x = torch.randn(len(ids), WIDE).to(dtype)
    a, b = stack(RANK, WIDE), stack(TALL, RANK)
    other_a, other_b = stack(RANK, WIDE) + 1, stack(2, RANK)
    y = torch.ones(len(ids), TALL + 2).to(dtype)
    made = wrapper(ids, ids)
    made.add_lora_linear(
        y, x, (a.to(dtype), other_a.to(dtype)), (b.to(dtype), other_b.to(dtype)), 1.0, (TALL, 2)
    )
    wanted = torch.cat(
        [by_row(x.float(), ids, a, b), by_row(x.float(), ids, other_a, other_b)], dim=1
    )
    close = 1e-5 if dtype is torch.float32 else 0.2
    torch.testing.assert_close(y.float(), 1 + wanted, atol=close, rtol=close)
    for row, number in enumerate(ids):
        if not number:
            assert torch.equal(y[row], torch.ones(TALL + 2).to(dtype))


def test_logits_are_of_the_rows_that_are_sampled() -> None:
    tokens, sampled = [10, 10, 0, 20], [10, 0, 20]
    x, y = torch.randn(3, WIDE), torch.zeros(3, VOCABULARY)
    a, b = stack(RANK, WIDE), stack(VOCABULARY, RANK)
    wrapper(tokens, sampled).add_lora_logits(y, x, a, b, 1.0)
    torch.testing.assert_close(y, by_row(x, sampled, a, b))


def test_embeddings_of_other_rows_are_left() -> None:
    tokens = [0, 10, 30, 0]
    y, x = torch.ones(4, TALL), torch.randn(4, RANK)
    b = stack(TALL, RANK)
    wrapper(tokens, [0]).add_lora_embedding(y, x, b)
    for row, place in enumerate([None, 0, 2, None]):
        added = 0 if place is None else b[place, 0] @ x[row]
        torch.testing.assert_close(y[row], torch.ones(TALL) + added)


def test_a_mixture_of_experts_is_refused_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    segments.refuse_experts(torch.nn.Linear(2, 2))
    monkeypatch.setattr(segments, "is_moe_model", lambda _: True)
    with pytest.raises(ValueError, match="mixture of experts on a CPU"):
        segments.refuse_experts(torch.nn.Linear(2, 2))

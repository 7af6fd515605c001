"""What a pipeline of layers is predicted to hide of its transfers."""

from __future__ import annotations

import pytest

from benchmarks.store import LAYERS
from benchmarks.transfer import hidden

STAGE_S = 0.02


def test_what_ends_with_its_own_layers_computation_is_hidden_whole() -> None:
    assert hidden(0.001, STAGE_S, 10, 0.015) == 1


@pytest.mark.parametrize("together", [1, 2, 10])
def test_the_layers_at_one_end_have_nothing_of_others_to_hide_behind(together: int) -> None:
    assert hidden(STAGE_S, STAGE_S, together, 0) == pytest.approx(1 - together / LAYERS)


def test_beyond_the_border_one_stage_of_each_layer_is_hidden() -> None:
    several = hidden(4 * STAGE_S, STAGE_S, 1, 0)
    assert several == pytest.approx((LAYERS - 1) / LAYERS / 4)
    assert hidden(4 * STAGE_S, STAGE_S, 1, STAGE_S / 2) > several

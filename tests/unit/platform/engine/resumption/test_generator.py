"""A seeded answer that goes on draws what it would have drawn."""

from __future__ import annotations

import pytest
import torch

from loomserve.platform.engine.resumption.model_runner import quickest_draw


@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 49152])
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_a_generator_is_moved_on_as_by_tokens(vocabulary: int, tokens: int) -> None:
    answered, going_on = torch.Generator(), torch.Generator()
    noise, draw = torch.empty(vocabulary), quickest_draw(vocabulary)
    for generator in (answered, going_on):
        generator.manual_seed(7)
    for _ in range(tokens):
        noise.exponential_(generator=answered)
        draw(going_on)
    assert torch.equal(answered.get_state(), going_on.get_state())

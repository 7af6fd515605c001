"""A seeded answer that goes on draws what it would have drawn."""

from __future__ import annotations

import pytest
import torch
import vllm._custom_ops  # noqa: F401 (vLLM draws in an operator of its own)
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from loomserve.platform.engine.resumption.model_runner import quickest_draw


@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 49152])
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_a_generator_is_moved_on_as_by_tokens(vocabulary: int, tokens: int) -> None:
    answered, going_on = torch.Generator(), torch.Generator()
    sampler, logits = TopKTopPSampler(), torch.zeros(1, vocabulary)
    draw = quickest_draw(vocabulary, sampler)
    for generator in (answered, going_on):
        generator.manual_seed(7)
    for _ in range(tokens):
        sampler(logits.clone(), {0: answered}, None, None)
        draw(going_on)
    assert torch.equal(answered.get_state(), going_on.get_state())
    assert draw.__name__ != "as_vllm", "it takes as long as sampling"

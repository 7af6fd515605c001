"""Packed copies of weights go, and what is computed with them made again is the same."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from loomserve.platform.base.heap import give_back_freed
from loomserve.platform.engine.sleeping.sleep import pack_on_use

MIB = 2**20
WORDS, WIDTH = 16384, 1024


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


class Model(torch.nn.Module):
    """Embeddings and an output head that share their weights, packed as vLLM loads them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.nn.Parameter(torch.randn(WORDS, WIDTH).to(dtype), requires_grad=False)
        self.embeddings = _layer(VocabParallelEmbedding, weight)
        self.head = _layer(ParallelLMHead, weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head.cpu_linear(x, self.head.weight, None)
        return logits


def _layer(kind: type[torch.nn.Module], weight: torch.nn.Parameter) -> Any:
    # Its own constructor asks which of several parallel processes it is in.
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight = weight
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_the_same_bits_with_weights_that_were_packed_again(dtype: torch.dtype) -> None:
    model = Model(dtype)
    for rows in (1, 5):
        x = torch.randn(rows, WIDTH).to(dtype)
        expected = model.logits(x)
        operators = pack_on_use(model)
        assert torch.equal(model.logits(x), expected)
        for each in operators:
            each.drop()
        assert torch.equal(model.logits(x), expected)


def test_a_drop_frees_the_copies_and_those_of_embeddings_go_at_once() -> None:
    model = Model(torch.float32)
    size = WORDS * WIDTH * 4
    begin = resident()
    operators = pack_on_use(model)
    give_back_freed()
    assert begin - resident() > 0.9 * size, "the copy that is never used"
    assert [each.nbytes for each in operators] == [0, size]
    for each in operators:
        each.drop()
    give_back_freed()
    assert begin - resident() > 1.9 * size
    assert [each.nbytes for each in operators] == [0, 0]
    model.logits(torch.randn(1, WIDTH))
    assert [each.nbytes for each in operators] == [0, size]


def test_embeddings_that_are_the_head_too_are_packed_when_they_are_used_as_one() -> None:
    model = Model(torch.float32)
    x = torch.randn(2, WIDTH)
    expected = model.logits(x)
    pack_on_use(model)
    logits = model.embeddings.cpu_linear(x, model.embeddings.weight, None)
    assert torch.equal(logits, expected)

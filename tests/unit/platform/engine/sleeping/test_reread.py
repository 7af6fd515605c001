"""Weights that files have too go in sleep and come back as they were, or stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from loomserve.platform.base.heap import give_back_freed
from loomserve.platform.engine.sleeping.memory import RereadWeight, reread_weights

WORDS, WIDTH, PADDED = 15_000, 512, 15_008
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Model(torch.nn.Module):
    """Embeddings and an output head, padded with zeros as vLLM pads them."""

    def __init__(self, embeddings: torch.Tensor, head: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.embeddings = _layer(VocabParallelEmbedding, embeddings, dtype)
        self.head = _layer(ParallelLMHead, head, dtype)


def _layer(kind: type[torch.nn.Module], stored: torch.Tensor, dtype: torch.dtype) -> Any:
    # Its own constructor asks which of several parallel processes it is in.
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    weight = torch.zeros(PADDED, WIDTH, dtype=dtype)
    weight[:WORDS] = stored.to(dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.fixture(name="tables")
def _tables(tmp_path: Path) -> dict[str, torch.Tensor]:
    made = {name: torch.randn(WORDS, WIDTH).to(torch.bfloat16) for name in (EMBEDDINGS, HEAD)}
    save_file({**made, "model.norm.weight": torch.ones(WIDTH)}, tmp_path / "model.safetensors")
    return made


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def dropped(weights: list[RereadWeight]) -> list[bool]:
    """Drop all, and say which have gone."""
    before = [bool(each._weight.any()) for each in weights]
    assert all(before)
    for each in weights:
        each.drop()
    # Pages at the ends hold something else, too.
    return [not each._weight[100:-100].any() for each in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_is_read_again_from_the_table_that_it_was_read_from(
    dtype: torch.dtype, tables: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = Model(tables[EMBEDDINGS], tables[HEAD], dtype)
    expected = {name: each.weight.clone() for name, each in model.named_children()}
    weights = reread_weights(model, tmp_path)
    assert [each.nbytes for each in weights] == [PADDED * WIDTH * dtype.itemsize] * 2
    for _ in range(2):
        before = resident()
        assert dropped(weights) == [True, True]
        give_back_freed()
        assert before - resident() > 1.8 * PADDED * WIDTH * dtype.itemsize
        for each in weights:
            each.restore()
        for name, layer in model.named_children():
            assert torch.equal(layer.weight, expected[name])


def test_tied_ones_are_one(tables: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = Model(tables[EMBEDDINGS], tables[EMBEDDINGS], torch.float32)
    model.head.weight = model.embeddings.weight
    (weight,) = reread_weights(model, tmp_path)
    assert dropped([weight]) == [True]
    weight.restore()
    assert torch.equal(model.head.weight[:WORDS], tables[EMBEDDINGS].float())


@pytest.mark.parametrize("where", ["a row", "the padding"])
def test_one_that_is_not_what_the_files_say_stays(
    where: str, tables: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = Model(tables[EMBEDDINGS], tables[HEAD], torch.float32)
    model.embeddings.weight[-1 if where == "the padding" else 7_000, 3] = 0.5
    weights = reread_weights(model, tmp_path)
    assert dropped(weights) == [False, True]
    for each in weights:
        each.restore()
    assert torch.equal(model.head.weight[:WORDS], tables[HEAD].float())


def test_a_file_that_is_replaced_meanwhile_is_still_there(
    tables: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = Model(tables[EMBEDDINGS], tables[HEAD], torch.float32)
    weights = reread_weights(model, tmp_path)
    assert dropped(weights) == [True, True]
    save_file({name: each * 2 for name, each in tables.items()}, tmp_path / "next")
    (tmp_path / "next").replace(tmp_path / "model.safetensors")
    for each in weights:
        each.restore()
    assert torch.equal(model.head.weight[:WORDS], tables[HEAD].float())
    # By now another model stands there.
    assert dropped(weights) == [False, False]
    (tmp_path / "model.safetensors").unlink()
    assert dropped(weights) == [False, False]


def test_a_file_that_is_written_to_meanwhile_is_nothing_to_wake_with(
    tables: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    weights = reread_weights(Model(tables[EMBEDDINGS], tables[HEAD], torch.float32), tmp_path)
    assert dropped(weights) == [True, True]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"xx")
    with pytest.raises(RuntimeError, match=r"model\.safetensors was changed while"):
        weights[0].restore()


def test_where_no_files_are_nothing_is_read_again(tables: dict[str, torch.Tensor]) -> None:
    model = Model(tables[EMBEDDINGS], tables[HEAD], torch.float32)
    assert reread_weights(model, Path("org/name")) == []

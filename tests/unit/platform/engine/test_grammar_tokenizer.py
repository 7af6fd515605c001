"""An engine's tokenizer is read with the first grammar."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers.registry import cached_get_tokenizer
from vllm.v1 import structured_output
from vllm.v1.structured_output import StructuredOutputManager

from loomserve.platform.engine.grammar_tokenizer import read_with_first_grammar


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    given = structured_output.cached_tokenizer_from_config
    monkeypatch.setattr(structured_output, "cached_tokenizer_from_config", given)
    monkeypatch.setattr(StructuredOutputManager, "tokenizer", None, raising=False)
    monkeypatch.setattr(xgrammar, "GrammarCompiler", xgrammar.GrammarCompiler)


def configured(folder: Path, **changes: Any) -> Any:
    """What a manager reads of vLLM's configuration; a whole one needs a model."""
    model = {
        "tokenizer": str(folder), "tokenizer_mode": "auto", "tokenizer_revision": None,
        "runner_type": "generate", "trust_remote_code": False, "skip_tokenizer_init": False,
        "hf_config": None, **changes,
    }  # fmt: skip
    grammars = {"reasoning_parser": "", "reasoning_parser_plugin": "", "enable_in_reasoning": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        structured_outputs_config=SimpleNamespace(**grammars),
    )


def test_it_is_read_once_and_not_when_the_engine_starts(tmp_path: Path) -> None:
    read_with_first_grammar()
    before = cached_get_tokenizer.cache_info().currsize
    manager = StructuredOutputManager(configured(tmp_path))
    assert cached_get_tokenizer.cache_info().currsize == before
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    tokenizer = manager.tokenizer
    assert tokenizer.convert_tokens_to_ids(["b", "a"]) == [2, 1]
    assert manager.tokenizer is tokenizer
    info = xgrammar.TokenizerInfo(["a", "b"])
    assert xgrammar.GrammarCompiler(info, max_threads=8).compile_regex("ab")
    assert cached_get_tokenizer.cache_info().currsize == before + 1


@pytest.mark.parametrize(("cores", "at_once"), [(1, 1), (2, 1), (4, 2), (64, 2)])
def test_grammars_leave_half_of_an_engines_cores_to_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, at_once: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    read_with_first_grammar()
    assert StructuredOutputManager(configured(tmp_path)).executor._max_workers == at_once

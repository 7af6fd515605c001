"""Front ends of a model share the copies of its tokenizer."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin, maybe_make_thread_pool

from loomserve.platform.front_end.engine.serving import share_tokenizer

WORDS = {"[UNK]": 0, **{f"word{number}": number for number in range(1, 500)}}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    return tmp_path


def configured(folder: Path, **changes: Any) -> ModelConfig:
    """What of vLLM's configuration concerns tokenizers; a whole one needs a model."""
    config = ModelConfig.__new__(ModelConfig)
    given = {
        "tokenizer": str(folder), "tokenizer_mode": "auto", "tokenizer_revision": None,
        "runner_type": "generate", "trust_remote_code": False, "skip_tokenizer_init": False,
        "enable_prompt_embeds": False, "renderer_num_workers": 1, "hf_config": None,
    }  # fmt: skip
    for name, value in (given | changes).items():
        object.__setattr__(config, name, value)
    return config


def test_what_front_ends_copy_is_one_tokenizer_that_many_threads_may_use(folder: Path) -> None:
    config = configured(folder)
    for _ in range(2):
        share_tokenizer(config)
    # As vLLM's renderer does with what it is given.
    mine, other = (copy.copy(cached_tokenizer_from_config(config)) for _ in range(2))
    maybe_make_thread_pool(mine, 2)
    assert mine is other
    texts = [" ".join(f"word{(n * k) % 499 + 1}" for k in range(50)) for n in range(400)]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(mine.encode, texts))
        assert list(pool.map(mine.decode, encoded)) == texts
    assert encoded[3] == [(3 * k) % 499 + 1 for k in range(50)]


@pytest.mark.parametrize("changes", [{"enable_prompt_embeds": True}, {"skip_tokenizer_init": True}])
def test_one_that_a_front_end_changes_is_not_shared(folder: Path, changes: dict[str, bool]) -> None:
    share_tokenizer(configured(folder, **changes))
    tokenizer = cached_tokenizer_from_config(configured(folder))
    assert not isinstance(tokenizer, ThreadSafeHFTokenizerMixin)
    assert copy.copy(tokenizer) is not tokenizer

"""The folder of simulated models: made without a download, and enough for a front end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from loomserve.platform.config import Model
from loomserve.platform.models import catalog, simulated
from loomserve.platform.placement import model_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOMSERVE_HOME", str(tmp_path_factory.mktemp("home")))
        return simulated.fetch()


def test_it_is_made_once_where_the_catalog_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))
    assert catalog.is_here("simulated"), "to make it takes no time"
    assert catalog.folder_here("simulated", tmp_path) is None
    made = catalog.resolve("simulated", tmp_path)
    assert isinstance(made, Path)
    assert catalog.folder_here("simulated", tmp_path) == made
    before = (made / "config.json").stat().st_mtime_ns
    assert catalog.resolve("simulated", tmp_path) == made
    assert (made / "config.json").stat().st_mtime_ns == before


def test_it_has_no_weights_and_no_attention_to_lend(folder: Path) -> None:
    catalog.check_folder(folder)
    assert catalog.weight_files(folder) == []
    assert not catalog.has_plain_attention(folder)
    model = Model(name="m", source="simulated")
    assert model_files.held_bytes(folder, model, on_gpus=False) == 0


def test_a_folder_of_another_kind_needs_weights(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config[simulated.MARK]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(catalog.ConfigError, match="safetensors"):
        catalog.check_folder(tmp_path)


@given(st.text(max_size=200))
def test_any_text_is_tokens_and_these_are_the_text(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(text).ids
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_answers_are_words_that_are_tokens_again(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [*simulated.WORDS]
    text = tokenizer.decode(words)
    assert len(text.split()) == len(set(text.split())) == len(words)
    assert tokenizer.encode(text).ids == words


def test_chats_are_set_by_its_template(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert tokens == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        tokenizer.eos_token_id == json.loads((folder / "config.json").read_text())["eos_token_id"]
    )

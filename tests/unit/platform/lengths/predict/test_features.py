"""Embeddings from a model folder, and features from them."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict import features
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.prediction import LengthQuery
from tests.unit.platform.lengths import lengths_folder
from tests.unit.platform.lengths.lengths_folder import DIMENSIONS, WORDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return lengths_folder.make(tmp_path)


def test_a_text_is_the_mean_of_its_tokens(folder: Path) -> None:
    embeddings = TokenEmbeddings(folder)
    expected = lengths_folder.table()[[WORDS.index("wd"), WORDS.index("wh"), 0]].mean(axis=0)
    np.testing.assert_allclose(embeddings.mean("wd wh unheard"), expected, rtol=1e-5)
    assert embeddings.dimensions == DIMENSIONS
    assert embeddings.tokens("wd wh unheard") == 3
    assert not embeddings.mean("").any()


def test_of_a_long_text_the_head_and_the_tail_count(folder: Path) -> None:
    embeddings = TokenEmbeddings(folder)
    head, tail = "wb " * 400, " wc" * 400
    np.testing.assert_array_equal(
        embeddings.mean(head + "wd " * 9000 + tail), embeddings.mean(head + "we " * 9000 + tail)
    )
    assert (embeddings.mean(head + tail) != embeddings.mean(head + head)).any()


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_table_of_half_precision_reads_alike(folder: Path, kind: str) -> None:
    whole = TokenEmbeddings(folder).mean("wd wh")
    table = lengths_folder.table()
    half = table.astype("<f2") if kind == "F16" else (table.view("<u4") >> 16).astype("<u2")
    entry = {"dtype": kind, "shape": list(table.shape), "data_offsets": [4, 4 + half.nbytes]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + b"\0\0\0\0" + half.tobytes()
    )
    embeddings = TokenEmbeddings(folder)
    np.testing.assert_allclose(embeddings.mean("wd wh"), whole, atol=0.03)
    assert embeddings.mean("wd wh").dtype == np.float32


def test_another_table_or_tokenizer_has_another_digest(folder: Path) -> None:
    before = TokenEmbeddings(folder).digest
    assert TokenEmbeddings(folder).digest == before
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("wbjj", "wjjj"))
    assert TokenEmbeddings(folder).digest != before


@pytest.mark.parametrize(
    ("lost", "said"), [("tokenizer.json", "tokenizer"), ("model.safetensors", "embedding table")]
)
def test_a_folder_without_embeddings_is_refused(folder: Path, lost: str, said: str) -> None:
    (folder / lost).unlink()
    with pytest.raises(ConfigError, match=said):
        TokenEmbeddings(folder)


def test_groups_are_summed_and_divided_by_the_root_of_their_size() -> None:
    vector = np.arange(8, dtype=np.float32)
    np.testing.assert_allclose(
        features.compressed(vector, 2), [6 / math.sqrt(4), 22 / math.sqrt(4)], rtol=1e-6
    )
    uneven = features.compressed(np.ones(10, np.float32), 4)
    np.testing.assert_allclose(uneven, np.sqrt([2, 3, 2, 3]), rtol=1e-6)


def test_magnus_sees_instruction_and_input_apart(folder: Path) -> None:
    embeddings = TokenEmbeddings(folder)
    see = features.magnus(embeddings)
    row = see(LengthQuery("translate this", "wb wc", 4))
    assert row.shape == (21,)
    assert row[-1] == 4
    other = see(LengthQuery("summarise this", "wb wc", 4))
    assert (row[:4] != other[:4]).all()
    assert (row[4:] == other[4:]).all()
    np.testing.assert_allclose(
        row[4:20], features.compressed(embeddings.mean("wb wc"), 16), rtol=1e-6
    )


def test_uellm_sees_the_whole_prompt(folder: Path) -> None:
    embeddings = TokenEmbeddings(folder)
    row = features.uellm(embeddings)(LengthQuery("translate this", "wb", 3))
    np.testing.assert_allclose(row[:-1], embeddings.mean("translate this wb"), rtol=1e-6)
    assert row[-1] == pytest.approx(math.log(4))


def test_an_application_is_its_instruction() -> None:
    one, same, other = (
        features.app(LengthQuery(t, x, 1)) for t, x in (("a", "x"), ("a", "y"), ("b", "x"))
    )
    assert one == same != other

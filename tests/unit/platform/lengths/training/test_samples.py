"""Samples from files, and their clean split."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.training.samples import fold, groups, normalised, read


def words(text: str) -> int:
    return len(text.split())


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_line_is_a_request(tmp_path: Path) -> None:
    row = {"instruction": "Fix this:", "input": "a b c", "out_tokens": 7, "id": 1}
    (sample,) = read(write(tmp_path / "code.jsonl", row), words)
    assert sample.query == LengthQuery("Fix this:", "a b c", 5)
    assert (sample.task, sample.tokens) == ("code", 7)
    (sample,) = read(write(tmp_path / "x", {**row, "task": "BF", "in_tokens": 40}), words)
    assert (sample.task, sample.query.input_tokens) == ("BF", 40)


def test_a_file_may_be_gzipped_and_have_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "code.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"instruction": "a", "out_tokens": 1}\n\n'))
    assert [sample.task for sample in read(path, words)] == ["code"]


def test_several_instructions_on_one_input_are_several_requests(tmp_path: Path) -> None:
    row = {"instructions": ["a", "b"], "input": "long", "out_tokens": [1, 2], "in_tokens": 9}
    got = read(write(tmp_path / "docs.jsonl", row), words)
    assert [(s.query.instruction, s.query.input_tokens, s.tokens) for s in got] == [
        ("a", 9, 1),
        ("b", 9, 2),
    ]


def test_of_several_models_one_is_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "eval.jsonl", {"instruction": "a", "out_tokens": {"x": 1, "y": 2}})
    (sample,) = read(path, words, "y")
    assert (sample.task, sample.tokens) == ("eval:y", 2)
    with pytest.raises(ConfigError, match=r"line 1: .*--model: x, y"):
        read(path, words)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_length": 7, "output_length": 8}, "no text to predict from"),
        ({"instruction": "a"}, "out_tokens must be a whole number"),
        ({"instruction": "a", "out_tokens": -1}, "not -1"),
        ({"instruction": "a", "out_tokens": True}, "not True"),
        ({"instruction": 5, "out_tokens": 1}, "must be text"),
        ({"instruction": "a", "out_tokens": 1, "in_tokens": "2"}, "in_tokens must be"),
        ({"instructions": ["a", "b"], "out_tokens": [1]}, "of equal length"),
    ],
)
def test_a_line_that_lacks_something_is_named(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "f.jsonl", {"instruction": "good", "out_tokens": 1}, row)
    with pytest.raises(ConfigError, match=rf"f\.jsonl, line 2: .*{said}"):
        read(path, words)


@pytest.mark.parametrize("content", [b"[1]\n", b"{\n", b"null\n", b"", b"\xff\n"])
def test_what_is_no_file_of_requests_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"f\.jsonl"):
        read(path, words)
    with pytest.raises(ConfigError, match=r"nothing\.gz"):
        read(tmp_path / "nothing.gz", words)


def test_case_marks_and_numbers_do_not_tell_texts_apart() -> None:
    assert normalised("Add 12 and\n7!") == normalised("add 345, and 0") == "add 0 and 0"


def query(text: str, instruction: str = "") -> LengthQuery:
    return LengthQuery(instruction, text, 1)


def test_near_duplicates_share_a_group_and_others_do_not() -> None:
    story = "once upon a time there was a small dog who liked to run in the park all day"
    first, number, word, other = groups(
        [
            query(story),
            query(story.upper() + "!!"),
            query(story.replace("small", "big")),
            query("once upon a time there was a king whose castle stood on a rock by the sea"),
        ]
    )
    assert first == number == word != other


def test_an_instruction_that_many_share_does_not_make_them_alike() -> None:
    task = "Correct the grammar of the following sentence, and explain at length what was wrong:"
    assert (
        len(set(groups([query("I goes", task), query("You is", task), query("I goes.", task)])))
        == 2
    )


def test_questions_on_one_document_stay_together() -> None:
    rng = random.Random(0)
    document = " ".join(f"word{rng.choice('abcdefgh')}{rng.choice('xyz')}" for _ in range(300))
    asked = [query(document, f"What about {topic}?") for topic in ("money", "people", "time")]
    assert len(set(groups(asked))) == 1


def test_folds_do_not_depend_on_the_order_of_samples() -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices("abcdefghij", k=rng.randint(1, 12))) for _ in range(300)]
    forward = dict(zip(texts, groups(list(map(query, texts))), strict=True))
    texts.reverse()
    backward = dict(zip(texts, groups(list(map(query, texts))), strict=True))
    assert forward == backward
    assert {fold(group, 5) for group in forward.values()} == set(range(5))

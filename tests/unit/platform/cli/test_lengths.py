"""``loomserve lengths``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sklearn.ensemble import RandomForestRegressor

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.cli import main
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.predictor import TrainedPredictor
from loomserve.platform.lengths.stored import folder_of
from loomserve.platform.lengths.training import fit
from loomserve.platform.lengths.training.versions import PredictorVersions
from tests.unit.platform.lengths import lengths_folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return lengths_folder.make(folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "instruction": sample.query.instruction,
                    "input": sample.query.user_input,
                    "out_tokens": sample.tokens,
                    "task": sample.task,
                }
            )
            + "\n"
            for sample in lengths_folder.samples(250)
        )
    )
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["loomserve", "lengths", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    return int(exit_.value.code or 0)


def test_what_is_trained_predicts(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        options = ("--name", "chat", "--embeddings", str(model))
        assert run(monkeypatch, "train", str(data), *options) == 0
        assert f"version {number} is current in {folder_of('chat')}" in capsys.readouterr().out
    version = PredictorVersions(folder_of("chat")).current()
    assert version is not None
    assert (version.number, version.parent) == (2, 1)
    predictor = TrainedPredictor(version.fitted, TokenEmbeddings(model))
    text = " ".join(lengths_folder.WORDS[5:35])
    assert predictor.predict(LengthQuery("translate this", text, 32)).tokens == pytest.approx(
        30, rel=0.25
    )


def test_an_evaluation_is_shown_and_saved(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "RandomForestRegressor", lambda _, **o: RandomForestRegressor(8, **o))
    saved = data.with_name("table.json")
    options = ("--embeddings", str(model), "--save", str(saved))
    assert run(monkeypatch, "evaluate", str(data), *options) == 0
    shown = capsys.readouterr().out
    assert "magnus" in shown
    assert "translate this: 1" in shown
    scores = json.loads(saved.read_text())
    assert {score["task"] for score in scores} == {"translate this", "list this", "all"}
    assert all(0 <= score["bucket"] <= score["near"] <= 1 for score in scores)


@pytest.mark.parametrize("name", ["", "..", ".chat", "a/b"])
def test_a_name_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="plain name"):
        folder_of(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kind", "oracle"), "write magnus or uellm"),
        (("--embeddings", "./nowhere"), "nowhere"),
        (("--embeddings", "some/model"), "give a model's folder"),
    ],
)
def test_what_is_wrong_is_named(
    options: tuple[str, ...],
    said: str,
    model: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "train", str(data), "--name", "chat", *options) == 2
    assert said in capsys.readouterr().err

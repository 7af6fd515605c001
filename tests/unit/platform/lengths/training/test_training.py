"""Training, and predictions without scikit-learn that are scikit-learn's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.head import EDGES, Forest, Head, bucket_of
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.predictor import KINDS, TrainedPredictor
from loomserve.platform.lengths.training import fit
from loomserve.platform.lengths.training.evaluation import ALL, evaluate
from loomserve.platform.lengths.training.retrain import TrainingError, in_own_process
from loomserve.platform.lengths.training.samples import folds_of
from loomserve.platform.lengths.training.versions import TrainingSet
from tests.unit.platform.lengths import lengths_folder

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("training")


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> TokenEmbeddings:
    return TokenEmbeddings(lengths_folder.make(tmp_path_factory.mktemp("model")))


def rows_and_tokens(number: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(number, 6)).astype(np.float32)
    return rows, np.exp(4 + rows[:, 0] + 0.3 * rng.normal(size=number)).astype(np.int64)


def test_a_forest_finds_the_leaves_that_scikit_learn_finds() -> None:
    rows, tokens = rows_and_tokens()
    made = fit.fit("magnus", rows, tokens)
    assert isinstance(made, Forest)
    theirs = RandomForestRegressor(100, min_samples_leaf=3, max_features=0.5, random_state=0)
    theirs.fit(rows, np.log1p(tokens), sample_weight=np.ones(len(rows)))
    unseen = np.random.default_rng(1).normal(size=(50, 6)).astype(np.float32)
    leaves = np.array([made.leaves(row) - made.roots for row in unseen])
    np.testing.assert_array_equal(leaves, theirs.apply(unseen))


def test_a_leaf_knows_the_mean_and_spread_of_its_lengths() -> None:
    rows, tokens = np.zeros((160, 1), np.float32), np.arange(160)
    guess = fit.fit("input length", rows, tokens).guess(rows[0])
    assert guess.tokens == pytest.approx(79.5)
    assert guess.low == pytest.approx(160 / 16, abs=1)
    assert guess.median == pytest.approx(160 / 2, abs=160 / 16)
    assert guess.high == pytest.approx(160 * 15 / 16, abs=1)


@pytest.mark.parametrize("most", [2, 3, 2000])
def test_a_classifier_gives_the_odds_that_scikit_learn_gives(most: int) -> None:
    rows, tokens = rows_and_tokens()
    tokens = np.minimum(tokens, EDGES[most] - 1 if most < 9 else tokens).astype(np.int64)
    made = fit.fit("uellm", rows, tokens)
    scaler = StandardScaler().fit(rows)
    theirs = LogisticRegression(C=0.5, max_iter=1000, tol=1e-3)
    theirs.fit(scaler.transform(rows), bucket_of(tokens))
    buckets = theirs.predict(scaler.transform(rows))
    agree = [made.guess(row).bucket == bucket for row, bucket in zip(rows, buckets, strict=True)]
    assert np.mean(agree) >= 0.99
    for row in rows[:20]:
        guess = made.guess(row)
        assert 0 <= guess.low <= guess.high <= EDGES[-1]
        assert guess.low <= guess.tokens <= guess.high
        assert guess.low <= guess.median <= guess.high


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_are_all_alike_can_be_learnt(kind: str) -> None:
    rows, _ = rows_and_tokens()
    guess = fit.fit(kind, rows, np.full(len(rows), 40)).guess(rows[0])
    assert (guess.tokens, guess.bucket) == (pytest.approx(40), 3)


@pytest.mark.parametrize("kind", ["magnus", "uellm", "input length"])
def test_a_bounded_prediction_is_the_mean_and_median_of_bounded_lengths(kind: str) -> None:
    tokens = rows_and_tokens()[1]
    head = fit.fit(kind, np.zeros((len(tokens), 1), np.float32), tokens)
    for most in (5, 40, 64, 100, 200, 5000):
        got = head.guess(np.zeros(1, np.float32), most)
        bounded = np.minimum(tokens, most)
        assert got.tokens <= most
        assert got.tokens == pytest.approx(bounded.mean(), rel=0.08)
        assert got.median <= most
        assert got.median == pytest.approx(np.median(bounded), rel=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_the_same_after_a_journey_through_arrays(kind: str) -> None:
    rows, tokens = rows_and_tokens()
    made = fit.fit(kind, rows, tokens)
    again: Head = KINDS[kind].head.of(made.arrays())
    assert [made.guess(row) for row in rows[:9]] == [again.guess(row) for row in rows[:9]]


@pytest.mark.parametrize("kind", ["magnus", "uellm"])
def test_weights_decide_where_samples_contradict(kind: str) -> None:
    rows = np.zeros((200, 3), np.float32)
    tokens = np.repeat([10, 1000], 100)
    weights = np.repeat([0.01, 1.0], 100)
    assert fit.fit(kind, rows, tokens, weights).guess(rows[0]).tokens > 900


def test_magnus_learns_what_each_application_does(embeddings: TokenEmbeddings) -> None:
    samples = lengths_folder.samples(600)
    fitted, learnt = fit.train("magnus", samples, folds_of(samples), embeddings, calibrate_on=0)
    predictor = TrainedPredictor(fitted, embeddings)
    text = " ".join(lengths_folder.WORDS[5:35])
    translation = predictor.predict(LengthQuery("translate this", text, 32))
    listing = predictor.predict(LengthQuery("list this", text, 32))
    assert translation.tokens == pytest.approx(30, rel=0.2)
    assert listing.tokens == pytest.approx(155, rel=0.3)
    assert translation.high - translation.low < listing.high - listing.low
    assert len(learnt.rows) < len(samples)


def test_too_few_samples_are_refused(embeddings: TokenEmbeddings) -> None:
    samples = lengths_folder.samples(99)
    with pytest.raises(ConfigError, match="99 samples are too few"):
        fit.train("magnus", samples, folds_of(samples), embeddings, calibrate_on=0)


def test_a_predictor_refuses_other_embeddings(embeddings: TokenEmbeddings, tmp_path: Path) -> None:
    samples = lengths_folder.samples(120)
    fitted, _ = fit.train("input length", samples, folds_of(samples), embeddings, calibrate_on=0)
    folder = lengths_folder.make(tmp_path)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("wbjj", "wjjj"))
    with pytest.raises(ConfigError, match="other embeddings"):
        TrainedPredictor(fitted, TokenEmbeddings(folder))


def test_every_request_is_tested_once_by_every_predictor(
    embeddings: TokenEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "RandomForestRegressor", lambda _, **o: RandomForestRegressor(8, **o))
    samples = lengths_folder.samples(400)
    scores = {(s.predictor, s.task): s for s in evaluate(samples, embeddings)}
    assert set(scores) == {(k, t) for k in KINDS for t in ("translate this", "list this", ALL)}
    assert {s.requests for (_, task), s in scores.items() if task == ALL} == {400}
    magnus, blind = scores["magnus", "translate this"], scores["mean per app", "translate this"]
    assert magnus.mae < blind.mae / 3
    assert magnus.r is not None
    assert magnus.r > 0.9
    assert magnus.bucket > blind.bucket
    for kind in KINDS:
        assert scores[kind, ALL].coverage == pytest.approx(0.9, abs=0.06)


def test_training_in_its_own_process_gives_the_same_head() -> None:
    rows, tokens = rows_and_tokens()
    weights = np.linspace(0.1, 1, len(rows))
    here = fit.fit("input length", rows, tokens, weights)
    there = in_own_process("input length", TrainingSet(rows, tokens, weights))
    assert [here.guess(row) for row in rows[:9]] == [there.guess(row) for row in rows[:9]]


def test_training_that_fails_says_why() -> None:
    rows, tokens = rows_and_tokens()
    rows[0, 0] = np.inf
    with pytest.raises(TrainingError, match="infinity"):
        in_own_process("magnus", TrainingSet(rows, tokens, np.ones(len(rows))))


def test_whoever_predicts_does_not_import_scikit_learn() -> None:
    code = (
        "import sys, loomserve.platform.lengths.training.learner, loomserve.platform.cli.main; "
        "sys.exit(any(name in sys.modules for name in ('sklearn', 'torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Learning from the requests served: when, from what, and back again."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestRegressor

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.head import Guess, Head
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.stored import untrained
from loomserve.platform.lengths.training import fit, learner
from loomserve.platform.lengths.training.learner import (
    PERIOD_S,
    Learner,
    Lessons,
    ObservedLength,
    Trainer,
    is_off,
)
from loomserve.platform.lengths.training.retrain import TrainingError
from loomserve.platform.lengths.training.samples import Sample, folds_of
from loomserve.platform.lengths.training.versions import PredictorVersions, TrainingSet
from tests.unit.platform.lengths import lengths_folder
from tests.waiting import PATIENCE_S

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("learning")

LEARNT, HELD_OUT = "000000000001", "000000000004"


@pytest.mark.parametrize(
    ("predicted", "tokens", "off"),
    [
        (20, 30, False),  # by ten tokens, no more
        (20, 31, True),
        (1000, 1090, False),  # by less than a tenth
        (1000, 1120, True),
        (1120, 1000, True),
        (11, 0, True),
    ],
)
def test_a_prediction_is_off_by_more_than_ten_tokens_and_a_tenth(
    predicted: float, tokens: int, off: bool
) -> None:
    assert is_off(predicted, tokens) == off


class Always:
    """A head that guesses the same whatever it is asked."""

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens

    def guess(self, features: np.ndarray, most: float = math.inf) -> Guess:
        return Guess(self.tokens, self.tokens / 2, self.tokens * 2, self.tokens, 0)

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    @classmethod
    def of(cls, arrays: object) -> Always:
        raise NotImplementedError


def outcome(tokens: int, predicted: float = 50, text: str = LEARNT) -> ObservedLength:
    return ObservedLength(np.zeros(3, np.float32), predicted, tokens, text)


def nothing() -> TrainingSet:
    return TrainingSet(np.zeros((0, 3), np.float32), np.zeros(0, np.int64), np.zeros(0))


def test_a_period_is_three_minutes() -> None:
    lessons = Lessons(now=100)
    assert not lessons.next_period(279.9)
    assert lessons.waits(250) == pytest.approx(30)
    assert lessons.next_period(280)
    assert not lessons.next_period(281)
    assert lessons.waits(281) == pytest.approx(PERIOD_S - 1)


def test_only_what_was_off_and_is_not_held_out_is_learnt() -> None:
    lessons = Lessons(now=0)
    for _ in range(learner.FEWEST):
        lessons.add(outcome(500, text=HELD_OUT))
    assert lessons.added_to(nothing()) is None
    lessons.add(outcome(51))
    assert lessons.added_to(nothing()) is None
    lessons.add(outcome(200))
    got = lessons.added_to(nothing())
    assert got is not None
    assert got.tokens.tolist() == [200]


def test_nothing_is_learnt_that_cannot_be_judged() -> None:
    lessons = Lessons(now=0)
    for _ in range(learner.FEWEST - 1):
        lessons.add(outcome(500, text=HELD_OUT))
    lessons.add(outcome(200))
    assert lessons.added_to(nothing()) is None
    lessons.add(outcome(500, text=HELD_OUT))
    assert lessons.added_to(nothing()) is not None


def test_lessons_wait_for_the_next_candidate_until_one_is_promoted() -> None:
    lessons = Lessons(now=0)
    for _ in range(learner.FEWEST):
        lessons.add(outcome(500, text=HELD_OUT))
    lessons.add(outcome(200))
    assert lessons.added_to(nothing()) is not None
    assert lessons.added_to(nothing()) is None  # nothing new
    lessons.add(outcome(300))
    again = lessons.added_to(nothing())
    assert again is not None
    assert again.tokens.tolist() == [200, 300]
    lessons.changed()
    lessons.add(outcome(400))
    after = lessons.added_to(again)
    assert after is not None
    assert after.tokens.tolist() == [200, 300, 400]


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_older_lessons_weigh_less_and_the_set_is_bounded(sizes: list[int]) -> None:
    training = nothing()
    for number, size in enumerate(sizes):
        lessons = Lessons(now=0)
        for _ in range(learner.FEWEST):
            lessons.add(outcome(0, text=HELD_OUT))
        for _ in range(size):
            lessons.add(outcome(1000 + number))
        training = lessons.added_to(training) or training
    weights = training.weights
    assert len(training.rows) == len(training.tokens) == len(weights)
    assert (np.diff(weights) >= 0).all()
    assert (np.diff(training.tokens) >= 0).all()
    assert not len(weights) or (weights[-1] == 1 and weights[0] > 0)


def test_a_candidate_must_be_better_on_enough_held_out_requests() -> None:
    outcomes = [outcome(100)] * learner.FEWEST
    assert learner.better(Always(90), Always(70), outcomes)
    assert not learner.better(Always(70), Always(70), outcomes)
    assert not learner.better(Always(90), Always(70), outcomes[1:])


def test_a_version_goes_back_only_if_it_is_clearly_worse() -> None:
    outcomes = [outcome(100)] * learner.FEWEST
    assert learner.worse(Always(70), Always(90), outcomes)
    assert not learner.worse(Always(89.9), Always(90), outcomes)
    assert not learner.worse(Always(70), Always(90), outcomes[1:])


# The learner: versions on disk, forests trained in this process, a clock that is set by hand.


def forest(kind: str, given: TrainingSet) -> Head:
    return fit.fit(kind, given.rows, given.tokens, given.weights)


@pytest.fixture(scope="module", autouse=True)
def _small_forests() -> Iterator[None]:
    """Of 30 trees, which are enough for these samples, and a third of the work."""

    def small(_: int, **more: Any) -> RandomForestRegressor:
        return RandomForestRegressor(30, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "RandomForestRegressor", small)
        yield


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> TokenEmbeddings:
    return TokenEmbeddings(lengths_folder.make(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def trained(embeddings: TokenEmbeddings) -> tuple[Any, ...]:
    samples = lengths_folder.samples(300)
    return fit.train("magnus", samples, folds_of(samples), embeddings, calibrate_on=0)


@pytest.fixture
def versions(tmp_path: Path, trained: tuple[Any, ...]) -> PredictorVersions:
    versions = PredictorVersions(tmp_path / "smollm2")
    versions.publish(*trained)
    return versions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Served:
    """A learner and its traffic."""

    def __init__(
        self, versions: PredictorVersions, embeddings: TokenEmbeddings, train: Trainer = forest
    ) -> None:
        version = versions.current()
        assert version is not None
        self.clock = Clock()
        self.learner = Learner(versions, version, embeddings, clock=self.clock, train=train)

    def untold(self, samples: list[Sample]) -> None:
        """Serve without predictions, then learn."""
        for sample in samples:
            assert self.learner.predict(sample.query) is None
            self.learner.observe(sample.query, None, sample.tokens)
        self.clock.now += PERIOD_S
        self.learner.learn()

    def period(self, samples: list[Sample]) -> tuple[float, float]:
        """Serve, then learn. Mean absolute error and coverage of the predictions made before."""
        errors, held = [], []
        for sample in samples:
            prediction = self.learner.predict(sample.query)
            assert prediction is not None
            errors.append(abs(prediction.tokens - sample.tokens))
            held.append(prediction.low <= sample.tokens <= prediction.high)
            self.learner.observe(sample.query, prediction, sample.tokens)
        self.clock.now += PERIOD_S
        self.learner.learn()
        return float(np.mean(errors)), float(np.mean(held))


def test_a_key_that_floods_adds_no_more_samples_than_the_others(
    versions: PredictorVersions, embeddings: TokenEmbeddings
) -> None:
    trained: list[TrainingSet] = []

    def note(kind: str, given: TrainingSet) -> Head:
        trained.append(given)
        return forest(kind, given)

    served = Served(versions, embeddings, note)
    for key, count, tokens in (("bob", 100, 3000), ("mallory", 1000, 7000)):
        for sample in lengths_folder.samples(count, seed=1):
            prediction = served.learner.predict(sample.query)
            served.learner.observe(sample.query, prediction, tokens, key)
    served.clock.now = PERIOD_S
    served.learner.learn()
    bobs, mallorys = (np.count_nonzero(trained[0].tokens == tokens) for tokens in (3000, 7000))
    assert bobs > 50
    assert mallorys <= 100


def test_nothing_happens_before_a_period_is_over(
    versions: PredictorVersions, embeddings: TokenEmbeddings
) -> None:
    served = Served(versions, embeddings)
    for sample in lengths_folder.samples(100, factor=4, seed=1):
        served.learner.observe(sample.query, served.learner.predict(sample.query), sample.tokens)
    served.clock.now = PERIOD_S - 1
    served.learner.learn()
    assert served.learner.version == 1
    served.clock.now = PERIOD_S
    served.learner.learn()
    assert served.learner.version == 2


def test_when_all_answers_become_three_times_as_long_the_error_recovers(
    versions: PredictorVersions, embeddings: TokenEmbeddings
) -> None:
    served = Served(versions, embeddings)
    before, covered = served.period(lengths_folder.samples(150, seed=100))
    assert covered > 0.8
    drifted = [
        served.period(lengths_folder.samples(150, factor=3, seed=200 + number))
        for number in range(5)
    ]
    first, lost = drifted[0]
    last, regained = drifted[-1]
    assert first > 4 * before
    assert lost < 0.5
    assert last < first / 2.5
    assert last < 1.5 * 3 * before  # lengths are three times as long, and so are errors
    assert regained > 0.8
    assert served.learner.version > 2


def test_a_candidate_that_is_no_better_is_dropped_and_what_serves_goes_on(
    versions: PredictorVersions, embeddings: TokenEmbeddings
) -> None:
    served = Served(versions, embeddings, lambda kind, given: forest(kind, shuffled(given)))
    served.period(lengths_folder.samples(150, seed=1))
    assert served.learner.version == 1
    current = versions.current()
    assert current is not None
    assert current.number == 1


def shuffled(given: TrainingSet) -> TrainingSet:
    order = np.random.default_rng(0).permutation(len(given.tokens))
    return TrainingSet(given.rows, given.tokens[order], given.weights)


def test_a_version_that_proves_worse_than_its_parent_goes_back(
    versions: PredictorVersions, embeddings: TokenEmbeddings
) -> None:
    served = Served(versions, embeddings)
    served.period(lengths_folder.samples(150, factor=3, seed=1))
    assert served.learner.version == 2
    served.period(lengths_folder.samples(150, seed=2))  # the old ways again
    current = versions.current()
    assert current is not None
    # Back to the first, from which what it got wrong may at once make a third.
    assert (current.number, current.parent) in {(1, None), (3, 1)}


def test_a_learner_that_starts_anew_still_knows_what_it_may_go_back_to(
    versions: PredictorVersions, embeddings: TokenEmbeddings
) -> None:
    Served(versions, embeddings).period(lengths_folder.samples(150, factor=3, seed=1))
    again = Served(versions, embeddings)
    assert again.learner.version == 2
    again.period(lengths_folder.samples(150, seed=2))
    current = versions.current()
    assert current is not None
    assert (current.number, current.parent) in {(1, None), (3, 1)}


def test_training_that_fails_leaves_what_serves(
    versions: PredictorVersions, embeddings: TokenEmbeddings
) -> None:
    def fails(kind: str, given: TrainingSet) -> Head:
        raise TrainingError("no memory")

    served = Served(versions, embeddings, fails)
    with pytest.raises(TrainingError):
        served.period(lengths_folder.samples(150, factor=3, seed=1))
    assert served.learner.version == 1
    prediction = served.learner.predict(lengths_folder.samples(1)[0].query)
    assert prediction is not None
    assert prediction.tokens > 0


def two_kinds(number: int, seed: int) -> list[Sample]:
    """Short answers to one kind of text, long ones to the other."""
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        word, tokens = rng.choice((("translate", 12), ("summarise", 200)))
        text = " ".join([word, *rng.choices(lengths_folder.WORDS[5:], k=3)])
        made.append(Sample("", LengthQuery("", text, 4), tokens + rng.randrange(10)))
    return made


def test_one_that_nobody_trained_says_nothing_until_it_has_learnt(
    tmp_path: Path, embeddings: TokenEmbeddings
) -> None:
    versions = PredictorVersions(tmp_path / "untrained")
    versions.publish(*untrained(embeddings))
    served = Served(versions, embeddings)
    served.untold(two_kinds(30, seed=1))
    assert served.learner.version == 1, "too few are held out to tell whether it is any good"
    served.untold(two_kinds(150, seed=2))
    assert served.learner.version == 2
    error, held = served.period(two_kinds(150, seed=3))
    assert error < 50, "half of what one length for all is off by"
    assert held > 0.75


def test_one_that_nobody_trained_is_read_as_it_was_written(
    tmp_path: Path, embeddings: TokenEmbeddings
) -> None:
    versions = PredictorVersions(tmp_path / "untrained")
    assert not versions.publish(*untrained(embeddings)).has_learnt
    again = PredictorVersions(versions.folder).current()
    assert again is not None
    assert not again.has_learnt
    assert (again.fitted.kind, len(again.training.weights)) == ("uellm", 0)


def test_who_follows_serves_what_another_has_learnt(
    versions: PredictorVersions, embeddings: TokenEmbeddings
) -> None:
    served, other = Served(versions, embeddings), Served(versions, embeddings)
    other.learner.take_over()
    assert other.learner.version == 1
    served.period(lengths_folder.samples(150, factor=4, seed=1))
    assert (served.learner.version, other.learner.version) == (2, 1)
    other.learner.take_over()
    assert other.learner.version == 2
    query = lengths_folder.samples(1)[0].query
    assert other.learner.predict(query) == served.learner.predict(query)


def test_its_thread_outlives_failures_and_ends_when_it_is_closed(
    versions: PredictorVersions, embeddings: TokenEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(versions, embeddings)
    tried = []

    def learn() -> None:
        tried.append(1)
        if len(tried) == 3:
            served.learner.close()
        raise TrainingError("no memory")

    monkeypatch.setattr(served.learner, "learn", learn)
    served.clock.now = PERIOD_S
    served.learner.start()
    served.learner._thread.join(PATIENCE_S)
    assert not served.learner._thread.is_alive()
    assert len(tried) == 3


# Versions


def test_a_version_reads_as_it_was_written(versions: PredictorVersions) -> None:
    current = versions.current()
    assert current is not None
    again = PredictorVersions(versions.folder).read(1)
    assert (again.number, again.parent, again.fitted.kind) == (1, None, "magnus")
    assert again.fitted.margin == current.fitted.margin
    row = again.training.rows[0]
    assert again.fitted.head.guess(row) == current.fitted.head.guess(row)
    assert PredictorVersions(versions.folder / "other").current() is None


def test_a_crash_while_writing_leaves_the_current_version(
    versions: PredictorVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = versions.current()
    assert current is not None

    def crash(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="No space"):
        versions.publish(current.fitted, current.training)
    monkeypatch.undo()
    again = versions.current()
    assert again is not None
    assert again.number == 1
    assert versions.publish(current.fitted, current.training).number == 2


def test_five_versions_are_kept(versions: PredictorVersions) -> None:
    current = versions.current()
    assert current is not None
    for _ in range(7):
        versions.publish(current.fitted, current.training)
    assert sorted(p.name for p in versions.folder.glob("*.npz")) == [
        f"{number:06d}.npz" for number in range(4, 9)
    ]
    last = versions.current()
    assert last is not None
    assert versions.roll_back(last).number == 7


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut short", None])
def test_a_damaged_version_is_named(versions: PredictorVersions, damage: bytes | None) -> None:
    path = versions.folder / "000001.npz"
    path.write_bytes(path.read_bytes()[:-500] if damage is None else damage)
    with pytest.raises(ConfigError, match=r"000001\.npz is no length predictor.* lengths train"):
        versions.current()


def test_the_first_version_has_nothing_to_go_back_to(versions: PredictorVersions) -> None:
    current = versions.current()
    assert current is not None
    with pytest.raises(ConfigError, match="train again"):
        versions.roll_back(current)

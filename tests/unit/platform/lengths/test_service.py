"""The gateway's predictors: in time or not at all, and learning from what ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.config import Lengths, Model
from loomserve.platform.lengths import stored
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.prediction import LengthQuery, Prediction
from loomserve.platform.lengths.service import LengthPredictions
from loomserve.platform.lengths.stored import (
    check_predictor,
    folder_of,
    open_predictor,
    prepare_predictor,
    remember_embeddings,
)
from loomserve.platform.lengths.training.learner import Learner
from loomserve.platform.lengths.training.versions import PredictorVersions
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.scheduling.policy.hints import Expected
from tests.unit.platform.lengths import lengths_folder
from tests.waiting import PATIENCE_S

REQUEST = {"messages": [{"role": "user", "content": "translate this"}], "max_tokens": 50}


class OnePredictor:
    """Says 20 tokens for everything; waits for ``go`` before it does."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.learns = self.closed = self.broken = self.untrained = False
        self.observed: list[tuple[LengthQuery, int, str]] = []

    def count(self, text: str) -> int:
        return len(text.split())

    def predict(self, query: LengthQuery) -> Prediction | None:
        self.go.wait(PATIENCE_S)
        if self.broken:
            raise ValueError("no")
        if self.untrained:
            return None
        return Prediction(20.0, 10.0, 45.0, 15.0)

    def observe(
        self, query: LengthQuery, prediction: Prediction | None, tokens: int, key: str
    ) -> None:
        assert (prediction is None) is self.untrained
        self.observed.append((query, tokens, key))

    def start(self) -> bool:
        self.learns = True
        return True

    def close(self) -> None:
        self.closed = True


class Gateway:
    """What of a gateway has to do with lengths."""

    def __init__(self, limit_s: float = 5.0) -> None:
        self.registry = CollectorRegistry()
        metrics = GatewayMetrics(self.registry)
        metrics.set_models({"chat": ["r1"]})
        self.predictor = OnePredictor()
        self.opened: list[str] = []
        self.lengths = LengthPredictions(metrics, open_one=self._open, limit_s=limit_s)

    def _open(self, name: str) -> Learner:
        if name == "broken":
            raise ConfigError("gone")
        self.opened.append(name)
        return cast(Learner, self.predictor)

    async def serve(self, **names: str) -> None:
        self.lengths.set_models(names)
        await asyncio.gather(*self.lengths._opening.values(), return_exceptions=True)

    def counted(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model": "chat", **labels})


def run(test: Callable[[Gateway], Any], **options: Any) -> None:
    async def main() -> None:
        gateway = Gateway(**options)
        try:
            await test(gateway)
        finally:
            gateway.predictor.go.set()
            gateway.lengths.close()

    asyncio.run(main())


def test_a_prediction_is_made_and_learnt_from() -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.serve(chat="chat-v1")
        assert gateway.opened == ["chat-v1"]
        assert gateway.predictor.learns
        predicted = await gateway.lengths.predict("chat", REQUEST)
        assert predicted is not None
        assert predicted.expected == Expected(20.0, 45.0)
        gateway.lengths.ended("chat", predicted, 26, "alice")
        query = LengthQuery("", "translate this", 2, 50)
        assert gateway.predictor.observed == [(query, 26, "alice")]
        assert gateway.counted("loomserve_length_predictions_total", outcome="made") == 1
        assert gateway.counted("loomserve_length_observed_total") == 1
        assert gateway.counted("loomserve_length_error_tokens_total") == 6

    run(test)


def test_one_that_has_not_learnt_anything_learns_and_says_nothing() -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.serve(chat="chat-v1")
        gateway.predictor.untrained = True
        predicted = await gateway.lengths.predict("chat", REQUEST)
        assert predicted is not None
        assert (predicted.expected, predicted.median) == (None, None)
        gateway.lengths.ended("chat", predicted, 26, "alice")
        assert [tokens for _, tokens, _ in gateway.predictor.observed] == [26]
        assert gateway.counted("loomserve_length_predictions_total", outcome="untrained") == 1
        assert gateway.counted("loomserve_length_observed_total") == 0

    run(test)


def test_a_request_goes_on_without_a_prediction_that_is_late_and_later_ones_get_theirs() -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.serve(chat="chat-v1")
        gateway.predictor.go.clear()
        assert await gateway.lengths.predict("chat", REQUEST) is None
        assert gateway.counted("loomserve_length_predictions_total", outcome="late") == 1
        gateway.predictor.go.set()
        while await gateway.lengths.predict("chat", REQUEST) is None:
            pass
        assert gateway.counted("loomserve_length_predictions_total", outcome="made") == 1

    run(test, limit_s=0.2)


def test_a_predictor_that_fails_stops_no_request() -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.serve(chat="chat-v1")
        gateway.predictor.broken = True
        assert await gateway.lengths.predict("chat", REQUEST) is None
        assert gateway.counted("loomserve_length_predictions_total", outcome="failed") == 1

    run(test)


def test_models_without_a_predictor_and_requests_without_text_are_not_predicted() -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.serve(chat="chat-v1", other="broken")
        assert await gateway.lengths.predict("unheard of", REQUEST) is None
        assert await gateway.lengths.predict("other", REQUEST) is None
        assert await gateway.lengths.predict("chat", {"prompt": [1, 2]}) is None
        assert gateway.counted("loomserve_length_predictions_total", outcome="made") == 0

    run(test)


def test_a_predictor_goes_with_its_model() -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.serve(chat="chat-v1")
        await gateway.serve(chat="chat-v1")
        assert gateway.opened == ["chat-v1"], "what does not change stays open"
        await gateway.serve()
        assert gateway.predictor.closed
        assert await gateway.lengths.predict("chat", REQUEST) is None

    run(test)


MODEL = Model(name="chat", source="demo", devices=("a",), lengths=Lengths(predictor="chat-v1"))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a small trained predictor named chat-v1."""
    from loomserve.platform.lengths.training import fit

    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    model = lengths_folder.make(tmp_path / "model")
    samples = lengths_folder.samples(150)
    folds = [number % 5 for number in range(len(samples))]
    embeddings = TokenEmbeddings(model)
    fitted, learnt = fit.train("magnus", samples, folds, embeddings, calibrate_on=0)
    folder = folder_of("chat-v1")
    PredictorVersions(folder).publish(fitted, learnt)
    remember_embeddings(folder, model)
    return folder


def test_a_stored_predictor_is_opened_by_its_name_alone_and_one_process_learns(
    trained: Path,
) -> None:
    check_predictor(MODEL)
    first, second = open_predictor("chat-v1"), open_predictor("chat-v1")
    query = LengthQuery("translate this", "wb wc", first.count("translate this wb wc"), 30)
    prediction = second.predict(query)
    assert 0 <= prediction.low <= prediction.tokens <= prediction.high <= 30
    assert first.start()
    assert not second.start(), "two would write the same versions"
    first.close()
    third = open_predictor("chat-v1")
    assert third.start()
    third.close()


def test_a_model_whose_predictor_is_missing_or_spoilt_is_told_what_to_run(trained: Path) -> None:
    (trained / "embeddings").unlink()
    with pytest.raises(ConfigError, match="loomserve lengths train FILES --name chat-v1"):
        check_predictor(MODEL)
    remember_embeddings(trained, trained / "nowhere")
    with pytest.raises(ConfigError, match="gone: run loomserve lengths train"):
        check_predictor(MODEL)
    unknown = MODEL.model_copy(update={"lengths": Lengths(predictor="unheard-of")})
    with pytest.raises(ConfigError, match=r"model 'chat'.*train FILES --name unheard-of"):
        check_predictor(unknown)
    check_predictor(MODEL.model_copy(update={"lengths": None}))


def test_a_model_without_a_trained_predictor_begins_one_of_its_own_name_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    embeddings = lengths_folder.make(tmp_path / "model")
    monkeypatch.setattr(stored.catalog, "resolve", lambda source, base: embeddings)
    model = MODEL.model_copy(update={"name": "org/chat", "lengths": Lengths()})
    check_predictor(model)
    assert not folder_of("org--chat").exists(), "whoever only checks makes nothing"
    for _ in range(2):
        prepare_predictor(model)
    check_predictor(model)
    opened = open_predictor("org--chat")
    assert opened.version == 1
    assert opened.predict(LengthQuery("", "translate this", 2, 30)) is None
    (folder_of("org--chat") / "embeddings").unlink()
    with pytest.raises(ConfigError, match=r"model 'org/chat'.*does not say whose embeddings"):
        check_predictor(model)


def test_one_that_needs_no_training_says_whose_embeddings_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(source: str, base: Path) -> Path:
        raise StartError("no route to the host")

    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(stored.catalog, "resolve", unreachable)
    with pytest.raises(ConfigError, match=r"'chat'.*embeddings of the model demo.*no route"):
        prepare_predictor(MODEL.model_copy(update={"lengths": Lengths()}))
    assert not folder_of("chat").exists()


def test_what_was_trained_under_the_models_name_is_where_it_begins(trained: Path) -> None:
    model = MODEL.model_copy(update={"name": "chat-v1", "lengths": Lengths()})
    prepare_predictor(model)
    assert open_predictor("chat-v1").predict(LengthQuery("", "list this", 2)) is not None

"""Predicted lengths: who would be late is refused, and answers tell how far predictions are off."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
import yaml

from loomserve.platform.access.keys import new_key
from loomserve.platform.base.files import replace_private
from loomserve.platform.lengths.stored import folder_of
from loomserve.platform.lengths.training.learner import PERIOD_S
from tests.e2e.conftest import COLD, COLD_MODEL, Platform
from tests.e2e.predicted import LONG, SHORT, question, story, trained
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_lending import replace_models

pytestmark = pytest.mark.e2e

MOST = 400
"""More tokens than the model answers a question with."""


@pytest.fixture(scope="module", autouse=True)
def _foretold(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Predictions for a model, which is loaded anew for them."""
    with trained(tmp_path_factory.mktemp("lengths")) as name:
        replace_models(platform, [COLD], COLD_MODEL | {"lengths": {"predictor": name}})
        yield
        replace_models(platform, [COLD], COLD_MODEL)


@pytest.fixture
def hurried(platform: Platform) -> Iterator[str]:
    """A key whose requests are refused where they would be late."""
    key, digest = new_key()
    file = platform.log.parent / "keys.yaml"
    replace_private(
        file,
        yaml.safe_dump({"api_keys": [{"name": "hurried", "hash": digest, "refuse_late": True}]}),
    )
    wait_for(lambda: ask(platform, key, question(1), 1).status_code == 200, 10)
    yield key
    replace_private(file, "api_keys: []")


def ask(
    platform: Platform,
    key: str,
    text: str,
    tokens: int,
    slo_ms: float | None = None,
    stream: bool = False,
    **fields: Any,
) -> httpx.Response:
    headers = {} if slo_ms is None else {"x-slo-ms": str(round(slo_ms))}
    body = {
        "model": COLD,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        **fields,
    }
    with platform.http(key) as http:
        return http.post("/v1/chat/completions", json=body, headers=headers)


def predicted(platform: Platform, asked: Callable[[], httpx.Response]) -> httpx.Response:
    """The answer to a request whose length is predicted: on a busy machine that may come late."""
    for _ in range(20):
        made = told(platform, "length_predictions", outcome="made")
        answer = asked()
        if told(platform, "length_predictions", outcome="made") > made:
            return answer
    pytest.fail("all predictions came late")


def pace(platform: Platform) -> dict[str, float] | None:
    (replica,) = model_state(platform, COLD)["replicas"]
    found: dict[str, float] | None = (replica["load"] or {}).get("pace")
    return found


def told(platform: Platform, name: str, **labels: str) -> float:
    return platform.metric(f"loomserve_{name}_total", model=COLD, **labels)


def test_a_long_answer_is_refused_where_a_short_one_is_in_time(
    platform: Platform, hurried: str
) -> None:
    # The first predictions take longest, and a late one costs a whole answer below.
    assert predicted(platform, partial(ask, platform, hurried, story(2), 1)).status_code == 200
    assert ask(platform, hurried, story(3), 40).status_code == 200
    # The engine has told how long its requests take.
    wait_for(lambda: pace(platform) is not None, 30)
    refused = told(platform, "refused_late")
    # Half of the time that the story would take, and five times that of the question.
    slo_ms = 1000 * (pace(platform) or {})["output_token_s"] * LONG / 2
    for stream in (False, True):
        late = predicted(platform, partial(ask, platform, hurried, story(5), LONG, slo_ms, stream))
        assert late.status_code == 429
        assert late.json()["error"]["code"] == "deadline_unreachable"
        assert late.json()["error"]["param"] == "x-slo-ms"
        assert late.headers["retry-after"].isdigit()
    assert told(platform, "refused_late") == refused + 2
    short = predicted(platform, partial(ask, platform, hurried, question(4), LONG, slo_ms))
    assert short.status_code == 200
    assert ask(platform, platform.key, story(6), 2, slo_ms).status_code == 200


def test_an_answer_that_ends_by_itself_tells_how_far_its_prediction_was_off(
    platform: Platform,
) -> None:
    observed, error = told(platform, "length_observed"), told(platform, "length_error_tokens")
    answer = predicted(platform, partial(ask, platform, platform.key, question(8), MOST))
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    off = abs(answer.json()["usage"]["completion_tokens"] - SHORT - 1)
    assert told(platform, "length_observed") == observed + 1
    assert told(platform, "length_error_tokens") - error == pytest.approx(off, abs=5)
    cut_off = predicted(platform, partial(ask, platform, platform.key, story(8), 2))
    assert cut_off.json()["choices"][0]["finish_reason"] == "length"
    assert told(platform, "length_observed") == observed + 1


@pytest.mark.parametrize(
    ("text", "fields"),
    [(question(8), {}), (story(8), {"stop": ["."]})],
    ids=["by the model", "by a stop string"],
)
def test_a_stream_teaches_its_length_though_its_client_is_not_told(
    platform: Platform, text: str, fields: dict[str, Any]
) -> None:
    observed = told(platform, "length_observed")
    asked = partial(ask, platform, platform.key, text, MOST, stream=True, **fields)
    answer = predicted(platform, asked)
    assert '"finish_reason":"stop"' in answer.text
    assert '"usage"' not in answer.text
    assert told(platform, "length_observed") == observed + 1


@pytest.fixture
def untrained(platform: Platform) -> Iterator[None]:
    """A predictor that has learnt nothing."""
    shutil.rmtree(folder_of(COLD), ignore_errors=True)
    replace_models(platform, [COLD], COLD_MODEL | {"lengths": {}})
    yield
    shutil.rmtree(folder_of(COLD), ignore_errors=True)


@pytest.mark.slow  # It learns every 3 minutes.
def test_without_training_a_model_is_predicted_once_enough_has_been_learnt(
    platform: Platform, untrained: None
) -> None:
    def answered(number: int) -> bool:
        answer = ask(platform, platform.key, question(number), MOST)
        return bool(answer.json()["choices"][0]["finish_reason"] == "stop")

    made = told(platform, "length_predictions", outcome="made")
    with ThreadPoolExecutor(8) as several:
        ended = sum(several.map(answered, range(160)))
    assert ended > 120
    assert told(platform, "length_predictions", outcome="untrained") >= 160
    assert told(platform, "length_predictions", outcome="made") == made

    def predicts() -> bool:
        ask(platform, platform.key, question(1000), 1)
        return told(platform, "length_predictions", outcome="made") > made

    wait_for(predicts, 2 * PERIOD_S)

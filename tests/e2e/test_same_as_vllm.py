"""The platform's answers are vLLM's own: one server of vLLM's beside it, asked the same.

Requests go one after another, so that no batch changes a number. See ``same_requests`` for
what is asked, and ``same_answers`` for what may differ in any two answers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.servers import Server
from loomserve.platform.engine.options.known import in_fields
from loomserve.platform.http.ingress.messages import too_long
from loomserve.platform.models import catalog
from loomserve.platform.requests.endpoints import ENDPOINTS
from loomserve.platform.requests.engine_request import FORWARDED
from tests.e2e.conftest import ENGINE, HOT, TOOLS, Platform, free_port
from tests.e2e.same_answers import Answer, assert_same
from tests.e2e.same_requests import CASES, MESSAGES, OF_OTHER_MODELS, Case

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

START_TIMEOUT_S = 300
ANSWER_TIMEOUT_S = 120
CORE = "0"
KV_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Difference:
    """How an error of the platform's differs from vLLM's; its shape is OpenAI's always."""

    why: str
    part: str
    """Of our message."""
    vllm: int
    """The status that vLLM answers."""
    ours: int


NO_MODEL = Difference("it names the models that the key may use", "does not exist here", 404, 404)
NO_ENDPOINT = Difference("it names what there is instead", "Its tasks are: chat", 404, 404)
NO_FORM = Difference("a form is read before a model is looked up", "takes a form", 404, 400)
MANY = Difference("server.max_sequences bounds it, not an engine's variable", "20000", 400, 400)
NUMBER = Difference("a model is looked up before its engine reads", "say which model", 400, 400)
UNSAID = Difference("with several models none is meant alone", "say which model", 200, 400)
WHOLE = Difference("limits count what it says", "must be a whole number", 400, 400)
SWITCH = Difference("the platform reads it, too", "must be true or false", 400, 400)
STATELESS = Difference("nothing is kept between requests", "would not be obeyed", 404, 400)
BACKGROUND = Difference("it names batches", "would not be obeyed", 400, 400)
ROLE = Difference("a role that no template names says nothing to a model", "'nobody'", 200, 400)
TOKEN = Difference("vLLM leaves out what is no token", "the vocabulary has", 200, 400)
REPEATED = re.compile(r" \(parameter=\w+(, value=.*)?\)$", re.DOTALL)
BY_DESIGN = {
    **{
        f"{kind}-model": NO_MODEL
        for kind in ("bad-chat", "bad-text", "bad-response", "bad-message")
    },
    "tokenize-model": NO_MODEL,
    "detokenize-model": NO_MODEL,
    **dict.fromkeys(("bad-chat-number_as_model", "bad-text-number_as_model"), NUMBER),
    **dict.fromkeys(("bad-chat-no_model", "bad-text-no_model"), UNSAID),
    **dict.fromkeys(("bad-chat-many", "bad-text-many"), MANY),
    **dict.fromkeys(("embeddings", "embeddings_list"), NO_ENDPOINT),
    **{
        name: NO_FORM if ENDPOINTS[case.path].is_form else NO_ENDPOINT
        for name, case in OF_OTHER_MODELS.items()
    },
    **{f"bad-{kind}-text_as_tokens": WHOLE for kind in ("chat", "text")},
    **{f"bad-{kind}-seed": WHOLE for kind in ("chat", "text")},
    **{f"bad-{kind}-stream": SWITCH for kind in ("chat", "text")},
    **{f"bad-response-previous{kind}": STATELESS for kind in ("", "_no_id")},
    "bad-response-background": BACKGROUND,
    "bad-chat-role": ROLE,
    "detokenize-unknown": TOKEN,
}


@pytest.fixture(scope="module")
def theirs(
    request: pytest.FixtureRequest, platform: Platform, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answer]:
    """vLLM's answers to all cases that are selected; its server is gone then.

    For after each answer its engine polls for a while, which would slow the platform's down.
    """
    own = (item for item in request.session.items if item.path == Path(__file__))
    cases = [item.callspec.params["case"] for item in own if hasattr(item, "callspec")]
    with vllm_server(tmp_path_factory.mktemp("vllm")) as client:
        return {case.name: ask(client, ENDPOINTS[case.path].at_engine, case) for case in cases}


@contextmanager
def vllm_server(folder: Path) -> Iterator[httpx.Client]:
    """vLLM's own server of the model that the platform has most replicas of."""
    port = free_port()
    options = {**ENGINE, **TOOLS, "kv_cache_memory_bytes": KV_CACHE_BYTES}
    model = catalog.resolve("demo", Path(), print)
    server = Server(
        "vllm",
        [
            # With all its threads, so that it leaves the platform the other core.
            *("taskset", "--cpu-list", CORE),
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", HOT),
            *("--host", "127.0.0.1", "--port", str(port)),
            *(flag(name, value) for name, value in options.items()),
        ],
        {"VLLM_CPU_OMP_THREADS_BIND": CORE, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
        port,
        "/health",
        folder / "server.log",
    )
    server.start()
    try:
        server.wait_ready(START_TIMEOUT_S)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_TIMEOUT_S) as client:
            yield client
    finally:
        server.stop()


def flag(name: str, value: object) -> str:
    """An engine option as vLLM's command line has it."""
    return f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")


def ask(client: httpx.Client, path: str, case: Case) -> Answer:
    # Ids are made of the request's own, where vLLM takes it.
    response = client.post(path, json=dict(case.body), headers={"x-request-id": case.name})
    return Answer(response.status_code, response.headers.get("content-type", ""), response.content)


def test_requests_are_of_all_endpoints() -> None:
    assert {case.path for case in CASES} >= set(FORWARDED)
    assert len({json.dumps([case.path, case.body]) for case in CASES}) == len(CASES) >= 200
    assert BY_DESIGN.keys() <= {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_answer(platform: Platform, theirs: dict[str, Answer], case: Case) -> None:
    with platform.http() as http:
        ours = ask(http, case.path, case)
    of_vllm = theirs[case.name]
    if ours.status >= 400:
        assert_shape(ours, case.path)
    if (differs := BY_DESIGN.get(case.name)) is not None:
        assert (of_vllm.status, ours.status) == (differs.vllm, differs.ours)
        assert differs.part in ours.error["message"]
        return
    with_tools = "tools" in case.body or "tools" in case.name
    assert_same(of_vllm, ours, exact=not case.batched, reasons=not with_tools)
    if ours.status >= 400:
        assert_same_error(ours, of_vllm, case)


def assert_same_error(ours: Answer, of_vllm: Answer, case: Case) -> None:
    """vLLM's words without what they repeat of the request, and a field that the request has."""
    words = REPEATED.sub("", in_fields(of_vllm.error["message"]))
    message, param = ours.error["message"], ours.error.get("param")
    if case.path == MESSAGES and "maximum context length" in words:
        words = too_long(words)
    if "validation error" in words or message.startswith(f"{param} "):
        # Ours of what vLLM tells with the input and with names of classes.
        assert len(message) <= 350
        assert case.path.startswith(MESSAGES) or message.startswith(str(param))
    else:
        assert message == words
    theirs = of_vllm.error.get("param")
    assert param == theirs or theirs is None or theirs.split(".")[0] not in case.body


def assert_shape(ours: Answer, path: str) -> None:
    """An error has the shape of its API's."""
    if path.startswith(MESSAGES):
        assert ours.error.keys() == {"message", "type"}
        assert ours.error["type"] in ("invalid_request_error", "not_found_error")
        return
    assert ours.error.keys() == {"message", "type", "param", "code"}
    assert ours.error["type"] == "invalid_request_error"
    assert isinstance(ours.error["code"], str)

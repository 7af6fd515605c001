"""A cross-encoder and a model that embeds, tiny and random, served by real engines."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from tests.e2e.conftest import Platform, server_section, started
from tests.e2e.test_admin import wait_for
from tests.e2e.test_batch import ended, lines_of, submit

pytestmark = pytest.mark.e2e

RERANKER, EMBEDDER = "reranker", "embedder"
HIDDEN = 64
"""Of two heads: vLLM's attention on a CPU has no heads narrower than 32."""
WORDS = ["paris", "is", "the", "capital", "of", "france", "rome", "italy", "what", "where", "?"]
QUERY = "what is the capital of france ?"
DOCUMENTS = ["paris is the capital of france", "rome", "the capital of italy is rome"]
PATIENCE_S = 60.0


def write_model(folder: Path, kind: type[transformers.PreTrainedModel], **config: Any) -> Path:
    """A BERT of two small layers with seeded random weights, and a tokenizer of whole words."""
    folder.mkdir()
    vocabulary = folder / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocabulary.write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(0)
    shape = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=64,
        # Else all texts look alike to random weights.
        initializer_range=0.5,
        **config,
    )
    kind(shape).eval().save_pretrained(folder)
    return folder


def configured(folder: Path) -> Any:
    def config(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
        engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64}
        server = server_section(port, hashes)
        server["usage"] = {"folder": "usage", "interval_s": 1}
        return {
            "devices": [
                {"name": f"core{each}", "kind": "cpu", "cores": [each]} for each in range(2)
            ],
            "models": [
                {
                    "name": name,
                    "source": str(folder / name),
                    "devices": [f"core{index}"],
                    "kv_cache_memory": "64MiB",
                    "engine": engine,
                }
                for index, name in enumerate((RERANKER, EMBEDDER))
            ],
            "aliases": {"search": {"models": {RERANKER: 1}}},
            "batch": {"folder": "batch"},
            "server": server,
        }

    return config


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("pooling")
    sequence = transformers.BertForSequenceClassification
    write_model(folder / RERANKER, sequence, num_labels=1, architectures=[sequence.__name__])
    write_model(folder / EMBEDDER, transformers.BertModel, architectures=["BertModel"])
    with started(folder, configured(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def http(platform: Platform) -> Iterator[httpx.Client]:
    with platform.http() as client:
        yield client


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def by_transformers(folder: Path) -> list[float]:
    """The scores as transformers computes them."""
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pairs = tokenizer([QUERY] * len(DOCUMENTS), DOCUMENTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return list(torch.sigmoid(model(**pairs).logits[:, 0]).tolist())


def used(platform: Platform, model: str) -> int:
    """Tokens of prompts that a model has been charged with."""
    with platform.admin() as admin:
        page = admin.get("/admin/v1/usage", params={"by": "model"}).raise_for_status().json()
    return sum(each["prompt_tokens"] for each in page["usage"] if each["model"] == model)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_as_transformers_would(
    path: str, platform: Platform, http: httpx.Client
) -> None:
    scores = by_transformers(platform.log.parent / RERANKER)
    ranked = ask(http, path, model="search", query=QUERY, documents=DOCUMENTS)
    found = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    assert [found[each] for each in range(3)] == pytest.approx(scores, abs=1e-3)
    best = [each["index"] for each in ranked["results"]]
    assert best == sorted(range(3), key=lambda each: -scores[each])
    one = ask(http, path, model=RERANKER, query=QUERY, documents=DOCUMENTS, top_n=1)
    assert [each["index"] for each in one["results"]] == best[:1]


def test_scores_are_those_of_the_ranking(platform: Platform, http: httpx.Client) -> None:
    scores = by_transformers(platform.log.parent / RERANKER)
    for path, first, second in (
        ("/v1/score", "queries", "documents"),
        ("/score", "text_1", "text_2"),
    ):
        scored = ask(http, path, model=RERANKER, **{first: QUERY, second: DOCUMENTS})
        assert [each["score"] for each in scored["data"]] == pytest.approx(scores, abs=1e-3)


def test_texts_are_classified(http: httpx.Client) -> None:
    told = ask(http, "/classify", model=RERANKER, input=DOCUMENTS)
    assert [len(each["probs"]) for each in told["data"]] == [1] * 3
    again = ask(http, "/v1/classify", model=RERANKER, input=DOCUMENTS)
    for one, other in zip(told["data"], again["data"], strict=True):
        assert one["label"] == other["label"]
        # Which texts are computed together moves the last digits.
        assert one["probs"] == pytest.approx(other["probs"], abs=1e-4)


def test_embeddings_of_all_endpoints_are_the_same(http: httpx.Client) -> None:
    told = ask(http, "/v1/embeddings", model=EMBEDDER, input=DOCUMENTS)
    vectors = np.array([each["embedding"] for each in told["data"]])
    assert vectors.shape == (3, HIDDEN)
    cohere = ask(
        *(http, "/v2/embed"), model=EMBEDDER, texts=DOCUMENTS, embedding_types=["float", "base64"]
    )["embeddings"]
    assert np.allclose(cohere["float"], vectors, atol=1e-5)
    first = np.frombuffer(base64.b64decode(cohere["base64"][0]), "<f4")
    assert np.allclose(first, vectors[0], atol=1e-5)
    pooled = ask(http, "/pooling", model=EMBEDDER, input=DOCUMENTS[0])["data"]
    assert np.allclose(pooled[0]["data"], vectors[0], atol=1e-5)
    scored = ask(http, "/v1/score", model=EMBEDDER, queries=DOCUMENTS[0], documents=DOCUMENTS)
    assert [each["score"] for each in scored["data"]] == pytest.approx(
        list(vectors @ vectors[0]), abs=1e-4
    )
    answer = http.post(
        "/v1/embeddings",
        json={"model": EMBEDDER, "input": DOCUMENTS, "encoding_format": "bytes"},
    )
    places = json.loads(answer.headers["metadata"])["data"]
    of_last = answer.content[places[-1]["start"] : places[-1]["end"]]
    assert np.allclose(np.frombuffer(of_last, "<f4"), vectors[-1], atol=1e-5)


def test_what_is_charged_is_what_the_answer_says(platform: Platform, http: httpx.Client) -> None:
    usage = ask(http, "/v1/tokenize", model=EMBEDDER, prompt=DOCUMENTS[1])
    assert usage["count"] == 3
    before = used(platform, EMBEDDER)
    told = ask(http, "/v1/embeddings", model=EMBEDDER, input=DOCUMENTS)["usage"]["prompt_tokens"]
    ask(http, "/v2/embed", model=EMBEDDER, texts=DOCUMENTS)
    wait_for(lambda: used(platform, EMBEDDER) >= before + 2 * told, PATIENCE_S)
    assert used(platform, EMBEDDER) == before + 2 * told
    before = used(platform, RERANKER)
    ranked = ask(http, "/v1/rerank", model="search", query=QUERY, documents=DOCUMENTS)
    told = ranked["usage"]["total_tokens"]
    wait_for(lambda: used(platform, RERANKER) >= before + told, PATIENCE_S)
    assert used(platform, RERANKER) == before + told


@pytest.mark.parametrize(
    ("model", "path", "body", "does"),
    [
        (EMBEDDER, "/classify", {"input": "x"}, "classify"),
        (RERANKER, "/v1/embeddings", {"input": "x"}, "embed"),
        (RERANKER, "/v2/embed", {"texts": ["x"]}, "embed as Cohere does"),
        (RERANKER, "/v1/chat/completions", {"messages": []}, "chat"),
        (RERANKER, "/v1/completions/render", {"prompt": "x"}, "render prompts"),
    ],
)
def test_another_task_is_refused_with_those_that_there_are(
    model: str, path: str, body: dict[str, Any], does: str, http: httpx.Client
) -> None:
    answer = http.post(path, json={"model": model, **body})
    assert answer.status_code == 404
    told = answer.json()["error"]["message"]
    assert told.startswith(f"The model '{model}' does not {does}. Its tasks are: ")
    assert "rerank (/v1/rerank)" in told


def test_a_batch_ranks_documents(platform: Platform) -> None:
    body = {"model": RERANKER, "query": QUERY, "documents": DOCUMENTS}
    lines = [
        {"custom_id": f"{each}", "method": "POST", "url": "/v1/rerank", "body": body}
        for each in range(3)
    ]
    client = platform.client()
    batch = ended(client, submit(client, lines, "/v1/rerank"))
    assert batch.status == "completed"
    answers = lines_of(client, batch.output_file_id)
    assert [len(each["response"]["body"]["results"]) for each in answers.values()] == [3] * 3

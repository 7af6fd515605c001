"""The table of vLLM's endpoints that the platform passes requests on to; a new one is a row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

MOST_TOKENIZE_BYTES = 2**20
"""Body of a request that no engine computes: its tokens are made one request at a time."""


class Counted(Enum):
    """What of a request counts in ``server.max_sequences`` and in limits of requests at once."""

    ANSWERS = auto()
    """Its prompts, times the answers to each."""
    DOCUMENTS = auto()
    """The longest of its lists: each document is read together with its query."""
    ONE = auto()
    """The request: texts of a list are short, and ``MOST_TEXTS`` bounds them."""


@dataclass(frozen=True)
class Endpoint:
    """One of vLLM's endpoints that takes one request and keeps nothing between requests."""

    does: str
    """What a model does that answers it, as a verb."""
    paths: tuple[str, ...]
    """As clients name it, the name that messages have first."""
    handler: str
    """The attribute of the state of vLLM's app that answers it; None there: the model cannot."""
    engine_path: str = ""
    """As vLLM's server names it; empty: as clients do."""
    lists: tuple[str, ...] = ()
    """Fields that may have several texts, each of which is computed."""
    counted: Counted = Counted.ANSWERS
    computes: bool = True
    """Whether an engine computes it; else the front end alone answers, and no tokens are used."""
    generates: bool = True
    """Whether its answer has tokens that the model made."""
    streams: bool = False
    """Whether ``stream`` asks for an event stream."""
    hints: bool = False
    """Whether its requests have ``vllm_xargs``, which the engine gets as ``extra_args``."""
    salted: bool = True
    """Whether its requests have ``cache_salt``."""
    is_form: bool = False
    """Whether its body is multipart/form-data, with the model in the field ``model``; else JSON."""
    in_batches: bool = False
    """Whether lines of batches may ask it."""
    most_bytes: int | None = None
    """Longest body; None: ``server.max_body``."""

    @property
    def name(self) -> str:
        return self.paths[0]

    @property
    def at_engine(self) -> str:
        """Its path at vLLM's server."""
        return self.engine_path or self.name


def _generation(does: str, path: str, handler: str, *lists: str, batch: bool = False) -> Endpoint:
    return Endpoint(does, (path,), handler, lists=lists, streams=True, hints=True, in_batches=batch)


def _audio(does: str, path: str, handler: str) -> Endpoint:
    return Endpoint(does, (path,), handler, streams=True, hints=True, salted=False, is_form=True)


def _pooling(
    does: str,
    handler: str,
    *paths: str,
    at: str = "",
    lists: tuple[str, ...] = ("input",),
    counted: Counted = Counted.ONE,
    salted: bool = True,
) -> Endpoint:
    return Endpoint(
        *(does, paths, handler, at, lists, counted),
        generates=False,
        salted=salted,
        in_batches=True,
    )


def _rendering(does: str, path: str, handler: str, at: str = "", *lists: str) -> Endpoint:
    return Endpoint(
        *(does, (path,), handler, at, lists),
        computes=False,
        generates=False,
        counted=Counted.ONE,
        most_bytes=MOST_TOKENIZE_BYTES,
    )


_ROWS = (
    _generation("chat", "/v1/chat/completions", "openai_serving_chat", batch=True),
    _generation(
        *("complete texts", "/v1/completions", "openai_serving_completion"),
        *("prompt", "prompt_embeds"),
        batch=True,
    ),
    _generation("answer responses", "/v1/responses", "openai_serving_responses"),
    _generation("answer messages", "/v1/messages", "anthropic_serving_messages"),
    _pooling("embed", "serving_embedding", "/v1/embeddings"),
    _pooling(
        *("embed as Cohere does", "serving_embedding", "/v2/embed"),
        lists=("texts", "images", "inputs"),
        salted=False,
    ),
    _pooling(
        *("rerank", "serving_scores", "/v1/rerank", "/v2/rerank", "/rerank"),
        at="/rerank",
        lists=("documents",),
        counted=Counted.DOCUMENTS,
    ),
    _pooling(
        *("score", "serving_scores", "/v1/score", "/score"),
        at="/score",
        lists=(
            *("queries", "documents", "items"),
            *("data_1", "data_2", "text_1", "text_2"),
        ),
        counted=Counted.DOCUMENTS,
    ),
    _pooling("classify", "serving_classification", "/v1/classify", "/classify", at="/classify"),
    _pooling("pool", "serving_pooling", "/v1/pooling", "/pooling", at="/pooling"),
    _audio("transcribe", "/v1/audio/transcriptions", "openai_serving_transcription"),
    _audio("translate", "/v1/audio/translations", "openai_serving_translation"),
    _rendering("render chats", "/v1/chat/completions/render", "serving_render"),
    _rendering("render prompts", "/v1/completions/render", "serving_render", "", "prompt"),
    _rendering("render messages", "/v1/messages/render", "serving_render"),
    _rendering("count tokens", "/v1/messages/count_tokens", "anthropic_serving_messages"),
    _rendering("tokenize", "/v1/tokenize", "serving_tokenization", "/tokenize"),
    _rendering("detokenize", "/v1/detokenize", "serving_tokenization", "/detokenize"),
)

ENDPOINTS = {path: row for row in _ROWS for path in row.paths}
"""By the paths that clients ask."""
AT_ENGINE = {row.at_engine: row for row in _ROWS}
"""By the paths of vLLM's server."""
_API = "/v1"


def is_for_clients(path: str) -> bool:
    """Whether a path is the API's, which asks for API keys."""
    return path in ENDPOINTS or path == _API or path.startswith(_API + "/")

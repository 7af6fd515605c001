"""The table of vLLM's endpoints that the platform passes requests on to; a new one is a row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

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
    hints: bool = False
    """Whether its requests have ``vllm_xargs``, which the engine gets as ``extra_args``."""
    salted: bool = True
    """Whether its requests have ``cache_salt``."""
    is_form: bool = False
    """Whether its body is multipart/form-data, with the model in the field ``model``; else JSON."""
    in_batches: bool = False
    most_bytes: int | None = None
    """Longest body; None: ``server.max_body``."""

    @property
    def name(self) -> str:
        return self.paths[0]

    @property
    def at_engine(self) -> str:
        return self.engine_path or self.name


_generation = partial(Endpoint, streams=True, hints=True)
_audio = partial(Endpoint, streams=True, hints=True, salted=False, is_form=True)
_pooling = partial(
    Endpoint, lists=("input",), counted=Counted.ONE, generates=False, in_batches=True
)
_rendering = partial(
    Endpoint, computes=False, generates=False, counted=Counted.ONE, most_bytes=MOST_TOKENIZE_BYTES
)
_CHAT, _COMPLETIONS, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
_PAIRS = ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2")

_ROWS = (
    _generation("chat", (_CHAT,), "openai_serving_chat", in_batches=True),
    _generation(
        "complete texts",
        (_COMPLETIONS,),
        "openai_serving_completion",
        lists=("prompt", "prompt_embeds"),
        in_batches=True,
    ),
    _generation("answer responses", ("/v1/responses",), "openai_serving_responses"),
    _generation("answer messages", (_MESSAGES,), "anthropic_serving_messages"),
    _pooling("embed", ("/v1/embeddings",), "serving_embedding"),
    _pooling(
        "embed as Cohere does",
        ("/v2/embed",),
        "serving_embedding",
        lists=("texts", "images", "inputs"),
        salted=False,
    ),
    _pooling(
        "rerank",
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        "serving_scores",
        "/rerank",
        lists=("documents",),
        counted=Counted.DOCUMENTS,
    ),
    _pooling(
        "score",
        ("/v1/score", "/score"),
        "serving_scores",
        "/score",
        lists=_PAIRS,
        counted=Counted.DOCUMENTS,
    ),
    _pooling("classify", ("/v1/classify", "/classify"), "serving_classification", "/classify"),
    _pooling("pool", ("/v1/pooling", "/pooling"), "serving_pooling", "/pooling"),
    _audio("transcribe", ("/v1/audio/transcriptions",), "openai_serving_transcription"),
    _audio("translate", ("/v1/audio/translations",), "openai_serving_translation"),
    _rendering("render chats", (f"{_CHAT}/render",), "serving_render"),
    _rendering("render prompts", (f"{_COMPLETIONS}/render",), "serving_render", lists=("prompt",)),
    _rendering("render messages", (f"{_MESSAGES}/render",), "serving_render"),
    _rendering("count tokens", (f"{_MESSAGES}/count_tokens",), "anthropic_serving_messages"),
    _rendering("tokenize", ("/v1/tokenize",), "serving_tokenization", "/tokenize"),
    _rendering("detokenize", ("/v1/detokenize",), "serving_tokenization", "/detokenize"),
)

ENDPOINTS = {path: row for row in _ROWS for path in row.paths}
"""By the paths that clients ask."""
AT_ENGINE = {row.at_engine: row for row in _ROWS}
"""By the paths of vLLM's server."""
_API = "/v1"


def is_for_clients(path: str) -> bool:
    """Whether a path is the API's, which asks for API keys."""
    return path in ENDPOINTS or path == _API or path.startswith(_API + "/")

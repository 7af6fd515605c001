"""Ways to write a path, what none of them opens, and hints where there is nothing."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import BadRequest, NothingThere
from loomserve.platform.http.ingress.paths import Directions, check_segments, in_one_way

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/tokenize", "/v1/detokenize", "/v1/models", "/v1/files", "/v1/batches",
)  # fmt: skip
CHAT, COMPLETIONS, EMBEDDINGS = ENDPOINTS[0], ENDPOINTS[1], ENDPOINTS[4]


@pytest.mark.parametrize(
    ("path", "written", "raw"),
    [
        ("/v1//models", "/v1/models", b"/v1/models"),
        ("//v1/models", "/v1/models", b"/v1/models"),
        ("/v1/models/", "/v1/models", b"/v1/models"),
        ("////", "/", b"/"),
        ("//", "/", b"/"),
        ("/console//", "/console/", b"/console/"),
        ("//console/", "/console/", b"/console/"),
        ("/console/x/", "/console/x", b"/console/x"),
        ("/v1/models/ä b/", "/v1/models/ä b", b"/v1/models/%C3%A4%20b"),
        ("/v1/models/a%2fb//", "/v1/models/a%2fb", b"/v1/models/a%252fb"),
    ],
)
def test_a_path_is_written_in_one_way(path: str, written: str, raw: bytes) -> None:
    assert in_one_way({"path": path}) == {"path": written, "raw_path": raw}


@pytest.mark.parametrize("path", ["/", "", "/v1/models", "/v1/models/a%2Fb", "/a\\b"])
def test_most_paths_are_left_alone(path: str) -> None:
    assert in_one_way({"path": path}) == {}


@pytest.mark.parametrize("path", ["/v1/../admin", "/..", "/.", "/v1/./models", "/v1/models/.."])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(BadRequest, match="the path it leads to"):
        check_segments(path)


@pytest.mark.parametrize("path", ["/v1/models/a..b", "/.well-known/x", "/v1/models/...", "/a."])
def test_names_with_dots_are_names(path: str) -> None:
    check_segments(path)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        # Without /v1, twice, or below another server's prefix
        ("/chat/completions", CHAT),
        ("/completions", COMPLETIONS),
        ("/models", "/v1/models"),
        ("/embeddings", EMBEDDINGS),
        ("/tokenize", "/v1/tokenize"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/v1/models/some/model", "/v1/models"),
        ("/api/v1/chat/completions", CHAT),
        ("/openai/v1/responses", "/v1/responses"),
        ("/openai/deployments/gpt-4o/chat/completions", CHAT),
        ("/v1/engines/davinci/completions", COMPLETIONS),
        ("/v1/engines/davinci/embeddings", EMBEDDINGS),
        ("/v1/engines", "/v1/models"),
        ("/v2/models", "/v1/models"),
        ("/v1/files/v1/batches", "/v1/batches"),
        # Other servers' own
        ("/api/chat", CHAT),
        ("/api/generate", COMPLETIONS),
        ("/api/tags", "/v1/models"),
        ("/api/embeddings", EMBEDDINGS),
        ("/completion", COMPLETIONS),
        # Mistyped
        ("/V1/Chat/Completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/chat", CHAT),
        ("/chat", CHAT),
        ("/v1/chat-completions", CHAT),
        ("/v1/embedding", EMBEDDINGS),
        ("/v1/response", "/v1/responses"),
        ("/v1/model", "/v1/models"),
        ("/v1/chat/completions/x", CHAT),
        # Not near to anything
        ("/", None),
        ("/v1", None),
        ("/favicon.ico", None),
        ("/admin/v1/nothing", None),
        ("/v1/images/generations", None),
        ("/" + "a" * 2**16, None),
    ],
)
def test_a_path_where_nothing_is_gets_a_hint_at_the_nearest(path: str, meant: str | None) -> None:
    directions = Directions(ENDPOINTS)
    assert directions.nearest(path) == meant
    said = directions.given(NothingThere("There is nothing."), path).message
    assert said == ("There is nothing." if meant is None else
                    f"There is nothing. Did you mean {meant}?")  # fmt: skip


def test_only_endpoints_that_there_are_are_hinted_at() -> None:
    assert Directions(("/v1/models",)).nearest("/api/chat") is None
    assert Directions(()).nearest("/chat/completions") is None

"""Which paths ask for what: a key, a token, or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import Forbidden, NothingThere, RequestError, Unauthorized
from loomserve.platform.config import Server
from loomserve.platform.http.ingress.authentication import Authentication

KEYS = {
    "api_keys": [
        {"name": "alice", "hash": hash_key("lsk-alice")},
        {"name": "bob", "hash": hash_key("lsk-bob")},
    ]
}
ADMIN = {"admin_token_hash": hash_key("admin")}
METRICS = {"metrics_token_hash": hash_key("metrics")}
REMOTE = {"host": "0.0.0.0"}
OPEN_REMOTE = {**REMOTE, "allow_unauthenticated": True}
ADMIN_PATHS = ["/admin", "/admin/v1/state", "/admin/v1/models", "/docs", "/redoc", "/openapi.json"]
DOCS = ["/admin/v1/docs", "/admin/v1/openapi.json"]


def entered(
    server: dict[str, Any], path: str, credential: str | None = None, **headers: str
) -> type[RequestError] | str | None:
    """The error; or the name of the API key, None without one."""
    given = {name.lower().encode(): value.encode() for name, value in headers.items()}
    if credential is not None:
        given[b"authorization"] = f"Bearer {credential}".encode()
    try:
        checked = Server.model_validate(server)
        key = Authentication(checked, LiveKeys(checked)).check(path, given)
    except RequestError as error:
        return type(error)
    return key and key.name


SERVERS = [ADMIN, ADMIN | KEYS, ADMIN | OPEN_REMOTE, ADMIN | REMOTE | KEYS, ADMIN | METRICS]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_the_admin_api_asks_for_its_token_wherever_it_listens(
    server: dict[str, Any], path: str
) -> None:
    for other in (None, "", "lsk-alice", "metrics", hash_key("admin"), "Admin", "admin admin"):
        assert entered(server, path, other) is Unauthorized
    assert entered(server, path, "admin") is None


@pytest.mark.parametrize("server", [{}, KEYS, OPEN_REMOTE, REMOTE | KEYS, METRICS])
@pytest.mark.parametrize("credential", [None, "", "lsk-alice", "metrics"])
def test_without_a_configured_token_nobody_is_an_operator(
    server: dict[str, Any], credential: str | None
) -> None:
    for path in ADMIN_PATHS:
        assert entered(server, path, credential) is Unauthorized
    assert entered(server, "/new", credential) is NothingThere


@pytest.mark.parametrize("path", DOCS)
def test_the_admin_apis_description_is_open_on_loopback_only(path: str) -> None:
    assert entered(ADMIN | KEYS, path) is None
    assert entered(ADMIN | REMOTE | KEYS, path) is Unauthorized
    assert entered(ADMIN | REMOTE | KEYS, path, "admin") is None
    assert entered(ADMIN, path + "/oauth2-redirect") is Unauthorized
    assert entered(ADMIN, path + "/") is Unauthorized


@pytest.mark.parametrize(
    ("server", "open_to"),
    [
        (ADMIN, {None, "admin", "lsk-alice", "metrics"}),
        (ADMIN | KEYS, {"admin"}),
        (ADMIN | OPEN_REMOTE, {"admin"}),
        (ADMIN | METRICS, {"admin", "metrics"}),
        (ADMIN | METRICS | KEYS, {"admin", "metrics"}),
        (ADMIN | METRICS | REMOTE | KEYS, {"admin", "metrics"}),
    ],
)
def test_metrics_are_open_only_without_keys_on_loopback(
    server: dict[str, Any], open_to: set[str | None]
) -> None:
    credentials = (None, "admin", "lsk-alice", "metrics")
    assert {c for c in credentials if entered(server, "/metrics", c) is None} == open_to


def test_the_metrics_token_opens_the_metrics_alone() -> None:
    server = ADMIN | METRICS | KEYS
    opened = [
        path
        for path in ("/metrics", "/metrics/", "/v1/models", "/v1/files", "/new", *ADMIN_PATHS)
        if not isinstance(entered(server, path, "metrics"), type)
    ]
    assert opened == ["/metrics"]


def test_keys_and_tokens_are_rings_apart() -> None:
    server = ADMIN | METRICS | KEYS
    assert entered(server, "/v1/models", "admin") is Unauthorized
    assert entered(server, "/v1/models", "lsk-bob") == "bob"
    assert entered(server, "/metrics", "lsk-bob") is Unauthorized


@pytest.mark.parametrize("server", [ADMIN, ADMIN | OPEN_REMOTE])
def test_v1_is_open_where_there_are_no_keys(server: dict[str, Any]) -> None:
    assert entered(server, "/v1/chat/completions", "EMPTY") is None


@pytest.mark.parametrize("path", ["/health", "/ready", "/-/healthz"])
@pytest.mark.parametrize("server", SERVERS)
def test_probes_need_no_key_and_know_whose_a_given_one_is(
    server: dict[str, Any], path: str
) -> None:
    assert entered(server, path) is None
    assert entered(server, path, "lsk-nobody") is None
    assert entered(server, path, "lsk-alice") == ("alice" if "api_keys" in server else None)


def test_where_a_key_or_token_is_right_any_page_may_send_it() -> None:
    server = ADMIN | KEYS
    assert entered(server, "/v1/models", "lsk-bob", Origin="https://evil.example") == "bob"
    assert entered(server, "/admin/v1/state", "admin", Origin="https://evil.example") is None
    assert entered(server, "/v1/models", Origin="https://evil.example") is Unauthorized


def test_another_host_is_refused_before_any_credential_is_looked_at() -> None:
    for path in ("/v1/models", "/admin/v1/state", "/metrics", "/new", "/health", "/ready", *DOCS):
        for credential in (None, "lsk-alice", "admin"):
            assert entered(ADMIN | KEYS, path, credential, Host="evil.example") is Forbidden


def test_probes_in_a_network_come_by_any_name() -> None:
    server = {**ADMIN, **REMOTE, **KEYS, "allowed_hosts": ["llm.example.org"]}
    assert entered(server, "/ready", Host="10.1.2.3:8000") is None
    assert entered(server, "/v1/models", "lsk-bob", Host="10.1.2.3:8000") is Forbidden
    assert entered(server, "/v1/models", "lsk-bob", Host="LLM.example.org:443") == "bob"
    assert entered(server, "/v1/models", "lsk-bob", Host="127.0.0.1:8000") == "bob"


def test_a_clients_port_has_nothing_for_operators_and_does_not_say_so() -> None:
    server = Server.model_validate(ADMIN | METRICS | KEYS)
    authentication = Authentication(server, LiveKeys(server))
    for path in (*ADMIN_PATHS, *DOCS, "/metrics", "/console/", "/new"):
        for token in ("admin", "metrics", "lsk-alice", "wrong"):
            headers = {b"authorization": f"Bearer {token}".encode()}
            with pytest.raises(NothingThere) as refused:
                authentication.check(path, headers, for_clients=True)
            assert "admin" not in str(refused.value).replace(path, "")
    headers = {b"authorization": b"Bearer lsk-bob"}
    bob = authentication.check("/v1/models", headers, for_clients=True)
    assert bob is not None
    assert bob.name == "bob"
    assert authentication.check("/ready", {}, for_clients=True) is None


CONSOLE = ["/console", "/console/", "/console/main.js", "/console/pages/fleet.js"]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("path", CONSOLE)
def test_the_console_s_files_are_open_by_the_server_s_own_names(
    server: dict[str, Any], path: str
) -> None:
    assert entered(server, path) is None
    named = server | {"allowed_hosts": ["loom.example"]}
    assert entered(named, path, Host="loom.example") is None
    assert entered(named, path, Host="evil.example") is Forbidden


@pytest.mark.parametrize("path", [*CONSOLE, "/consoles", "/console.js"])
def test_without_a_console_its_paths_are_those_of_nothing(path: str) -> None:
    off = {} if path not in CONSOLE else {"console": False}
    assert entered(ADMIN | off, path) is NothingThere

"""One course of events on the platform; what each of its users sees is compared by a test."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client import generate_latest

from tests.unit.contracts.fleet import ADMIN, ALICE, WholePlatform
from tests.unit.contracts.recordings import families
from tests.waiting import within

Told = dict[str, Any]
"""What was asked, and the answer."""
SAYS = [{"role": "user", "content": "What do you know of looms?"}]
_GREEDY = {"model": "chat", "temperature": 0}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weave",
        "parameters": {"type": "object", "properties": {"threads": {"type": "integer"}}},
    },
}
_ATTEMPTS = 40
_GOES_ON = ("mail/sleep", "mail/wake", "org/cold/replicas", "timeout_s=0")
_ENDED = ("completed", "failed", "expired", "cancelled")


def answers(whole: WholePlatform) -> Told:
    """Of the endpoints for clients, and their errors."""
    chat = {**_GREEDY, "messages": SAYS, "max_tokens": 3}
    text = {**_GREEDY, "prompt": "A loom", "max_tokens": 3}
    response = {**_GREEDY, "input": "A loom", "max_output_tokens": 3, "store": False}
    told: Told = {}
    for name, path, body in (
        ("chat", "chat/completions", chat),
        ("chat, to its end", "chat/completions", {**chat, "max_tokens": 64}),
        ("chat, log probabilities", "chat/completions",
         {**chat, "logprobs": True, "top_logprobs": 1, "n": 2, "temperature": 1, "seed": 1}),
        ("chat, tools", "chat/completions", {**chat, "tools": [_TOOL]}),
        ("chat, adapter", "chat/completions", {**chat, "model": "chat-sql"}),
        ("chat, alias", "chat/completions", {**chat, "model": "assistant"}),
        ("completions", "completions", text),
        ("completions, two", "completions", {**text, "prompt": ["A", "B"], "logprobs": 1}),
        ("responses", "responses", response),
        ("messages", "messages", chat),
        ("messages, tokens", "messages/count_tokens", {"model": "chat", "messages": SAYS}),
        ("tokenize", "tokenize", {"model": "chat", "prompt": "A loom"}),
        ("detokenize", "detokenize", {"model": "chat", "tokens": [300, 301]}),
        ("embeddings", "embeddings", {"model": "chat", "input": "A loom"}),
        ("score", "score", {"model": "chat", "text_1": "A", "text_2": "B"}),
        ("rerank", "rerank", {"model": "chat", "query": "A", "documents": ["B"]}),
        ("no model", "chat/completions", {**chat, "model": "none"}),
        ("no messages", "chat/completions", {"model": "chat"}),
        ("no JSON object", "chat/completions", [1]),
        ("wrong type", "completions", {**text, "max_tokens": "many"}),
        ("too long", "completions", {**text, "prompt": "A loom " * 3000}),
        ("a grammar", "chat/completions",
         {**chat, "response_format": {"type": "json_object"}}),
        ("messages, no model", "messages", {**chat, "model": "none"}),
        ("messages, no tokens", "messages", {"model": "chat", "messages": SAYS}),
    ):  # fmt: skip
        told[name] = whole.ask("POST", f"/v1/{path}", body)
    for name, path, body, events in (
        ("chat", "chat/completions", chat, 5),
        ("chat, usage", "chat/completions",
         {**chat, "stream_options": {"include_usage": True}}, 6),
        ("completions", "completions", text, 4),
        ("responses", "responses", response, 11),
        ("messages", "messages", chat, 7),
        ("no model", "chat/completions", {**chat, "model": "none"}, 1),
    ):  # fmt: skip
        told[f"{name}, streamed"] = _stream(whole, f"/v1/{path}", body, events)
    for path in ("/v1/models", "/v1/models/chat", "/v1/models/none", "/health", "/ready", "/none"):
        told[f"GET {path}"] = whole.ask("GET", path)
    for name, key, path in (
        ("no key", "", "/v1/models"),
        ("a wrong key", "sk-wrong", "/v1/models"),
        ("a model of others", "sk-bob", "/v1/models/mail"),
        ("no admin token", ALICE, "/admin/v1/state"),
        ("metrics without a token", "", "/metrics"),
    ):
        told[name] = whole.ask("GET", path, key=key)
    told["not allowed"] = whole.ask("GET", "/v1/chat/completions")
    told["a model of others, asked"] = whole.ask(
        "POST", "/v1/completions", {**text, "model": "mail"}, key="sk-bob"
    )
    told["deadline"] = whole.ask(
        "POST", "/v1/completions", text, headers={"x-slo-ms": "60000", "x-request-id": "mine"}
    )
    told["wrong deadline"] = whole.ask(
        "POST", "/v1/completions", text, headers={"x-slo-ms": "soon"}
    )
    return told


def _stream(whole: WholePlatform, path: str, body: dict[str, Any], events: int) -> Any:
    """The answer of so many events: a machine that is busy has tokens come together."""
    found: list[Any] = []
    for _ in range(_ATTEMPTS):
        found.append(whole.ask("POST", path, {**body, "stream": True}))
        if len(found[-1]["body"]) >= events:
            break
    return max(found, key=lambda each: len(each["body"]))


def batches(whole: WholePlatform) -> Told:
    """Files and batches, and what operators see of them."""
    body = {**_GREEDY, "prompt": "A loom", "max_tokens": 3}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, **more}}
        for name, more in (("good", {}), ("wrong", {"max_tokens": -1}), ("none", {"model": "none"}))
    ]
    written = "\n".join(map(json.dumps, lines))
    told: Told = {}

    def ask(method: str, path: str, body: Any = None, name: str = "", **more: Any) -> Any:
        answer = whole.ask(method, path, body, **more)
        told[name or f"{method} {path}"] = answer
        return answer["body"]

    file = ask(
        "POST", "/v1/files", name="upload",
        files={"file": ("in.jsonl", written)}, data={"purpose": "batch"},
    )  # fmt: skip
    ask("GET", f"/v1/files/{file['id']}", name="a file")
    order = {
        "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h",
        "metadata": {"for": "test"},
    }  # fmt: skip
    batch = ask("POST", "/v1/batches", order, "create")
    path = f"/v1/batches/{batch['id']}"
    within(10, lambda: whole.ask("GET", path)["body"]["status"] in _ENDED)
    ended = ask("GET", path, name="a batch that ended")
    for kind in ("output", "error"):
        content = whole.ask("GET", f"/v1/files/{ended[f'{kind}_file_id']}/content")["body"]
        lines = content if isinstance(content, list) else content.splitlines()
        told[kind] = sorted(
            (json.loads(line) if isinstance(line, str) else line for line in lines),
            key=lambda line: str(line["custom_id"]),
        )
    ask("GET", "/v1/files")
    ask("GET", "/v1/batches")
    ask("POST", f"{path}/cancel", name="cancel what ended")
    ask("POST", "/v1/batches", {**order, "input_file_id": "file-none"}, "no file")
    ask("POST", "/v1/batches", {}, "no order")
    ask("GET", "/v1/files/file-none")
    told["admin: batches"] = whole.admin("GET", "/batches")
    told["admin: batch"] = whole.admin("GET", f"/batches/{batch['id']}")
    told["admin: cancel"] = whole.admin("POST", f"/batches/{batch['id']}/cancel")
    told["admin: no batch"] = whole.admin("GET", "/batches/batch_none")
    ask("DELETE", f"/v1/files/{file['id']}", name="delete a file")
    return told


def seen_by_operators(whole: WholePlatform) -> Told:
    """All that the admin API shows."""
    for model in ("chat", "mail"):
        asked = {"model": model, "temperature": 0, "prompt": "A loom", "max_tokens": 3}
        whole.ask("POST", "/v1/completions", asked)
    # Their replicas report it, and after two reports their rates are known.
    within(30, lambda: '"pace": null' not in json.dumps(whole.admin("GET", "/state")))
    within(30, lambda: "-core" not in json.dumps(whole.admin("GET", "/rebalancing")["body"]))
    whole.hear()
    told: Told = {}
    for path in (
        "/state", "/models", "/models/org/hot", "/models/none", "/events", "/nodes",
        "/models/chat/adapters", "/models/chat/adapters/chat-sql", "/models/chat/adapters/none",
        "/aliases", "/aliases/assistant", "/aliases/none", "/lending", "/rebalancing",
        "/rebalancing/events", "/plans", "/plans/none", "/kv", "/keys", "/tracing",
        "/usage?by=key", "/usage?by=nobody", "/nothing",
    ):  # fmt: skip
        told[path] = whole.admin("GET", path)
    return told


def changed_by_operators(whole: WholePlatform) -> Told:
    """What changes are answered with."""
    told: Told = {}
    model = {"name": "new", "source": "simulated", "devices": ["core1"]}
    set_role = {"actions": [{"action": "set_role", "engine": "h0", "role": "prefill"}]}
    move = {"action": "move", "kind": "heads", "engine": "h0", "lender": "c0", "amount": 1}
    for method, path, body in (
        ("PUT", "/aliases/canary", {"chat": 1, "mail": 0}),
        ("PUT", "/aliases/canary", {"chat": -1}),
        ("DELETE", "/aliases/canary", None),
        ("DELETE", "/aliases/none", None),
        ("PUT", "/replicas/h0/draining", {"draining": True}),
        ("PUT", "/replicas/h0/draining", {"draining": False}),
        ("PUT", "/replicas/none/draining", {"draining": True}),
        ("PUT", "/replicas/h0/role", {"role": "prefill"}),
        ("PUT", "/replicas/h0/role", {"role": "king"}),
        ("POST", "/nodes/local/drain", None),
        ("DELETE", "/nodes/none/drain", None),
        ("PUT", "/lending/pairs/org/hot/org/cold", {"enabled": False}),
        ("PUT", "/lending/pairs/org/hot/none", {"enabled": False}),
        ("POST", "/lending/loans/loan-0/drain", None),
        ("POST", "/lending/loans/none/drain", None),
        ("PUT", "/rebalancing", {"mode": "advise", "paused": True}),
        ("PUT", "/rebalancing", {}),
        ("POST", "/plans", {"actions": [move], "force": True}),
        ("POST", "/plans", set_role),
        ("POST", "/plans", {"force": True}),
        ("POST", "/plans/none/apply", None),
        ("POST", "/plans/none/abort", None),
        ("POST", "/models/mail/sleep", None),
        ("POST", "/models/mail/wake", None),
        ("POST", "/models/none/sleep", None),
        ("PUT", "/models/org/cold/replicas", {"replicas": 1}),
        ("PUT", "/models/org/cold/replicas", {"replicas": 0}),
        ("PUT", "/models/chat/replicas", {"replicas": "auto"}),
        ("PUT", "/models/chat/adapters/other", {"source": str(whole.folder / "sql")}),
        ("PUT", "/models/chat/adapters/bad", {"source": "/nowhere"}),
        ("DELETE", "/models/chat/adapters/other", None),
        ("POST", "/models", {**model, "surprise": 1}),
        ("POST", "/models", {**model, "devices": ["none"]}),
        ("POST", "/models", {**model, "name": "chat"}),
        ("POST", "/kv/pin", {"model": "chat", "prompt": "A loom", "pinned": True}),
        (
            "POST",
            "/kv/pin",
            {"model": "chat", "prompt": "A loom", "pinned": True, "api_key": "alice"},
        ),
        ("POST", "/kv/flush", {"model": "none"}),
        ("POST", "/kv/flush", {}),
        ("DELETE", "/models/org/hot?timeout_s=0", None),
        ("DELETE", "/models/none", None),
        ("POST", "/state", {}),
    ):
        whole.hear()
        name = f"{method} {path} {json.dumps(body)}".replace(str(whole.folder), "FOLDER")
        answer = whole.admin(method, path, body)
        # Of what has only begun, it is told how far it is.
        told[name] = answer["status"] if path.endswith(_GOES_ON) else answer
    within(10, lambda: whole.admin("GET", "/models/org/hot")["status"] == 404)
    for path in ("/events", "/rebalancing/events", "/plans"):
        told[f"GET {path}, then"] = whole.admin("GET", path)
    return told


def metrics(whole: WholePlatform) -> Told:
    """Families of the metrics page: type, help and labels of each."""
    # What a replica's process has itself, here other tests have, too: test_descriptions has all.
    own = generate_latest().decode()
    found = families(whole.ask("GET", "/metrics", key=ADMIN)["body"])
    return {name: found[name] for name in found.keys() - families(own).keys()}


COURSE = (seen_by_operators, batches, changed_by_operators, answers, metrics)
"""In this order: each sees what those before have done."""

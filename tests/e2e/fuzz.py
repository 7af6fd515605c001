"""Random requests, made from schemas: most are nearly right, and each can be made again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import TypeAdapter

Schema: TypeAlias = Mapping[str, Any]

_TEXTS = ("", "a", "hello", "user", "\x00", "é𝕏\u202e", "'; DROP TABLE files;--",
          "../../etc/passwd", "{{7*7}}", "%s%n", "null", "1e999", "\ud800", "a" * 2000,
          "<|im_end|>", "[", "(a+)+$", "batch", "file-none", "text",
          "json_schema", "auto", "image_url")  # fmt: skip
_NUMBERS = (0, 1, 2, -1, 0.5, 1.0, -0.0, 127, 2**31, -(2**31), 2**63, 2**64, 10**30, 1e308,
            float("nan"), float("inf"), float("-inf"))  # fmt: skip
_ODD = (None, True, False, [], {}, [[]], [None], {"": ""}, {"a": {"b": [1, "x"]}})
_DEPTH = 6
_HELLO = [{"role": "user", "content": "hello"}]
_USUAL: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": _HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": _HELLO},
    "/v1/messages/count_tokens": {"messages": _HELLO},
    "/v1/embeddings": {"input": "hello"},
    "/v1/tokenize": {"prompt": "hello"},
    "/v1/detokenize": {"tokens": [1, 2, 3]},
}
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")
_CONTENT_TYPES = ("application/json", "text/plain", "application/x-www-form-urlencoded",
                  "multipart/form-data", "multipart/form-data; boundary=b", "application/msgpack",
                  "application/json; charset=utf-16", "")  # fmt: skip
_PATHS = ("/", "/v1", "/v1/", "//v1/models", "/v1/models/%00", "/v1/models/..%2f..%2fadmin",
          "/v1/../admin/v1/state", "/admin", "/admin/v1/", "/admin/v1/docs", "/docs", "/metrics",
          "/health", "/ready", "/v1/models", "/v1/files?limit=-1", "/v1/batches?after=%ff",
          "/v1/files/%F0%9F%92%A9/content", "/v1/files/a/b/c", "/v1/realtime", "/version",
          "/v1/audio/transcriptions", "/v1/load_lora_adapter", "/collective_rpc")  # fmt: skip


@dataclass
class Sent:
    """One request, as it is given to an HTTP client."""

    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    operation: str = ""
    """Method and path, without what varies."""


class Values:
    """Values of a JSON schema; now and then something else stands in their place."""

    def __init__(self, schema: Schema, dice: random.Random, odd: float) -> None:
        self._definitions = {**schema.get("$defs", {}), **_components(schema)}
        self._dice = dice
        self._odd = odd

    def of(self, schema: Schema, depth: int = 0) -> Any:
        if self._dice.random() < self._odd or depth > _DEPTH:
            return self.odd()
        if "$ref" in schema:
            return self.of(self._definitions[schema["$ref"].rsplit("/", 1)[1]], depth + 1)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self.of(self._dice.choice(schema[several]), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._dice.choice(schema["enum"])
        return self._plain(schema, depth)

    def _plain(self, schema: Schema, depth: int) -> Any:
        dice = self._dice
        match schema.get("type"):
            case "object":
                return self.object(schema, depth)
            case "array":
                few = range(dice.choice((0, 1, 1, 2, 3)))
                return [self.of(schema.get("items", {}), depth + 1) for _ in few]
            case "string":
                return dice.choice(_TEXTS)
            case "integer":
                low = schema.get("minimum", -1)
                return dice.choice((low, schema.get("maximum", 20), dice.randrange(0, 20)))
            case "number":
                return dice.choice((*_NUMBERS[:8], dice.random()))
            case "boolean":
                return dice.random() < 0.5
            case "null":
                return None
        return self.odd()

    def object(self, schema: Schema, depth: int = 0) -> dict[str, Any]:
        """With what is required, and a few of the rest."""
        fields = schema.get("properties", {})
        asked = set(schema.get("required", ()))
        chosen = self._dice.sample(sorted(fields), min(len(fields), self._dice.randrange(5)))
        made = {name: self.of(fields[name], depth + 1) for name in sorted(asked) + chosen}
        if self._dice.random() < self._odd:
            made[self._dice.choice(_TEXTS)] = self.odd()
        return made

    def odd(self) -> Any:
        return self._dice.choice((*_TEXTS, *_NUMBERS, *_ODD))


def _components(schema: Schema) -> Schema:
    found: Schema = schema.get("components", {}).get("schemas", {})
    return found


class Requests:
    """Requests to all endpoints: those of the model's compute one token each."""

    def __init__(self, admin: Schema, model: str, seed: str) -> None:
        """
        Args:
            admin: the admin API's OpenAPI document.
            model: the name of a small model.
            seed: the same requests follow from the same.
        """
        self._admin = admin
        self._operations = [
            (method.upper(), path, described)
            for path, methods in sorted(admin["paths"].items())
            for method, described in sorted(methods.items())
        ]
        self._model = model
        self._seed = seed
        self._generated = _schemas()

    def __iter__(self) -> Iterator[Sent]:
        number = 0
        while True:
            yield self.made(number)
            number += 1

    def made(self, number: int) -> Sent:
        """The request of this number."""
        dice = random.Random(f"{self._seed} {number}")
        kinds = (self._for_an_engine, self._for_the_admin_api, self._for_the_lane, self._anywhere)
        (kind,) = dice.choices(kinds, (4, 3, 2, 1))
        sent: Sent = kind(dice)
        self._spoil(sent, dice)
        return sent

    def _for_an_engine(self, dice: random.Random) -> Sent:
        path = dice.choice(sorted(self._generated))
        schema = self._generated[path]
        values = Values(schema, dice, odd=dice.choice((0.0, 0.02, 0.1)))
        body = values.of(schema)
        if isinstance(body, dict):
            for name, value in {"model": self._model, **_USUAL[path]}.items():
                if dice.random() < 0.9:
                    body[name] = value
            body |= {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1}
            body.pop("min_tokens", None)
            if isinstance(n := body.get("n"), int) and 3 < n <= 128:
                body["n"] = 2
        return Sent("POST", path, _encoded(body), operation=f"POST {path}")

    def _for_the_admin_api(self, dice: random.Random) -> Sent:
        method, path, described = dice.choice(self._operations)
        filled = path
        for parameter in described.get("parameters", ()):
            # Never the name of what is there: other tests need it.
            unknown = dice.choice(("fuzz", "fuzz/fuzz", "fuzz%20%00", "fuzz-1", "..%2ffuzz"))
            filled = filled.replace(f"{{{parameter['name']}}}", unknown)
        queries = [one["name"] for one in described.get("parameters", ()) if one["in"] == "query"]
        if queries and dice.random() < 0.7:
            value = dice.choice(("0", "-1", "1e9", "nan", "x", "", "99999999999999999999"))
            filled += f"?{dice.choice(queries)}={value}"
        body: Any = None
        if "requestBody" in described:
            schema = described["requestBody"]["content"]["application/json"]["schema"]
            body = Values(self._admin, dice, odd=dice.choice((0.0, 0.1))).of(schema)
            if isinstance(body, dict):
                self._keep_harmless(path, body)
        content = b"" if body is None else _encoded(body)
        return Sent(method, f"/admin/v1{filled}", content, operation=f"{method} /admin/v1{path}")

    def _keep_harmless(self, path: str, body: dict[str, Any]) -> None:
        if path == "/models":
            body["devices"] = ["fuzz"]
        elif path == "/rebalancing":
            body["mode"] = "fuzz"
        elif path.startswith("/kv/"):
            body["model"] = "fuzz"

    def _for_the_lane(self, dice: random.Random) -> Sent:
        kind = {"content-type": "multipart/form-data; boundary=b"}
        if dice.random() < 0.3:
            parts = [
                b'--b\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
                % (
                    dice.choice((b"file", b"purpose", b"expires_after[seconds]", b"")),
                    dice.choice((b"", b'; filename="f"', b"; filename*=UTF-8''%ff")),
                    dice.choice((b"batch", b"{}", b'{"custom_id": 1}\n' * 3, b"\xff\x00")),
                )
                for _ in range(dice.randrange(5))
            ]
            content = b"".join(parts) + dice.choice((b"--b--\r\n", b"--b", b""))
            return Sent("POST", "/v1/files", content, kind, "POST /v1/files")
        if dice.random() < 0.5:
            body = {
                "input_file_id": dice.choice((*_TEXTS, None, 7)),
                "endpoint": dice.choice(("/v1/completions", "/v1/chat/completions", "", 3)),
                "completion_window": dice.choice(("24h", "1h", "0h", "nan", -1, None)),
                "metadata": dice.choice((*_ODD, {"a": "b" * 600})),
            }
            return Sent("POST", "/v1/batches", _encoded(body), operation="POST /v1/batches")
        method = dice.choice(("GET", "DELETE", "POST"))
        path = dice.choice(
            ("/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/batches/{}/cancel",
             "/v1/files?limit={}", "/v1/files?after={}", "/v1/batches?limit={}&after={}")
        )  # fmt: skip
        given = dice.choice(("file-none", "batch_none", "%00", "0", "-1", "1e9", "%F0%9F%92%A9"))
        return Sent(method, path.replace("{}", given), operation=f"{method} {path}")

    def _anywhere(self, dice: random.Random) -> Sent:
        path = dice.choice(_PATHS)
        return Sent(dice.choice(("GET", "GET", *_METHODS)), path, operation=f"any {path}")

    def _spoil(self, sent: Sent, dice: random.Random) -> None:
        if dice.random() < 0.05:
            sent.method = dice.choice(_METHODS)
        if dice.random() < 0.05:
            at = dice.randrange(len(sent.content) + 1)
            junk = dice.choice((b"", b"\xff", b"\x00", b"[" * 5000, b"{}", b"9" * 5000))
            sent.content = sent.content[:at] + junk + sent.content[at + dice.randrange(20) :]
        sent.headers.setdefault("content-type", "application/json")
        spoilt = {
            "content-type": _CONTENT_TYPES,
            "x-slo-ms": ("60000", "0", "-1", "nan", "x", "1e400"),
            "x-request-id": ("fuzz", "", "a" * 5000, "fuzz fuzz", "{{7*7}}"),
            "range": ("bytes=0-", "bytes=9-1", "bytes=-5", "lines=1"),
            "accept": ("text/html", "text/event-stream", ""),
            "origin": ("https://evil.example", "null"),
            "expect": ("100-continue",),
            "content-encoding": ("gzip", "br"),
        }
        for name, values in spoilt.items():
            if dice.random() < 0.02:
                sent.headers[name] = dice.choice(values)
        if sent.method in ("GET", "HEAD", "OPTIONS", "TRACE"):
            sent.content = b""


def _schemas() -> dict[str, Schema]:
    """Schemas of requests that an engine answers, by path."""
    # Here, since to import vLLM takes seconds, and no other test of the folder needs it.
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
    )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest

    return {
        "/v1/chat/completions": _schema(ChatCompletionRequest),
        "/v1/completions": _schema(CompletionRequest),
        "/v1/responses": _schema(ResponsesRequest),
        "/v1/messages": _schema(AnthropicMessagesRequest),
        "/v1/messages/count_tokens": _schema(AnthropicCountTokensRequest),
        "/v1/embeddings": _schema(EmbeddingRequest),
        "/v1/tokenize": _schema(TokenizeRequest),
        "/v1/detokenize": _schema(DetokenizeRequest),
    }


def _schema(of: Any) -> Schema:
    return TypeAdapter(of).json_schema()


def _encoded(body: Any) -> bytes:
    return json.dumps(body).encode()

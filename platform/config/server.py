"""The section ``server``, with ``server.tls`` and ``server.usage``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.config.base import Bytes, FieldError, Section
from loomserve.platform.config.keys import ApiKeys, KeyHash
from loomserve.platform.config.tracing import Tracing

HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$")]

LogFormat = Literal["text", "json"]


class Tls(Section):
    """The certificate by which the server speaks TLS (1.2 or 1.3)."""

    certificate: Annotated[str, Field(min_length=1)] = Field(
        description="PEM file with the server's certificate and then those of its issuers, "
        "relative to this file. A new one is taken over within two seconds, without a restart."
    )
    key: Annotated[str, Field(min_length=1)] = Field(
        description="PEM file with its private key, not encrypted, that no other user can read."
    )


class Usage(Section):
    """What each API key uses of each model, kept for accounting."""

    folder: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Folder with a file for each month, relative to this file; null: usage-PORT in "
        "the user's cache folder. On several nodes it should be one that all share.",
    )
    interval_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="How often lines are written; a gateway that is killed forgets so much.",
    )


class Server(Section):
    """The HTTP server: where it listens, who may ask, and within which limits."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    admin_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="Port of the operators' own, which a firewall can close to clients: it answers "
        "all that there is, and port answers /v1 and the probes alone. null: port answers all.",
    )
    tls: Tls | None = Field(
        None, description="Speak HTTPS; null: HTTP, which others on the way can read."
    )
    api_keys: ApiKeys = Field((), description="Without keys, anyone may ask.")
    api_keys_file: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="YAML file with more api_keys, relative to this file, that no other user can "
        "read. It is read again within a second of each change, without a restart; with it, "
        "nobody may ask without a key.",
    )
    admin_token_hash: KeyHash | None = Field(
        None,
        description="Hash of the admin token; without it loomserve serve keeps a token in the file "
        "admin-token of the user's cache folder.",
    )
    metrics_token_hash: KeyHash | None = Field(
        None,
        description="Hash of a token that opens /metrics alone, as for Prometheus; the admin token "
        "opens it too. Open without either on loopback, if there are no keys.",
    )
    allow_unauthenticated: bool = Field(
        False,
        description="Serve /v1 without keys although the address is not loopback; all else asks "
        "for its token.",
    )
    max_body: Bytes = Field(8 * 2**20, description="Larger request bodies are answered 413.")
    max_body_total: Bytes = Field(
        256 * 2**20,
        description="Bodies of all requests together; what comes beyond is answered 503.",
    )
    max_sequences: int = Field(
        128,
        ge=1,
        description="Prompts of one request times its n, or documents to rerank or score; more are "
        "answered 400. Of texts to embed 1,024 are allowed.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="A request that takes longer is ended with 408."
    )
    stream_idle_timeout_s: float = Field(
        60.0,
        gt=0,
        description="An answer of which an engine has given something, and gives no more for so "
        "long though no request waits there, is ended with an error.",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="A client must have sent its whole request by then."
    )
    max_connections: int = Field(
        1024,
        ge=1,
        description="Beyond these, connections without a request give way to new clients, or the "
        "client is answered 503; with tls, where handshakes count too, it is hung up on. Where a "
        "process may not have as many file descriptors, there are fewer.",
    )
    max_connections_per_address: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="The same for each IPv4 address, and each IPv6 network of 64 bits. null: a "
        "quarter of max_connections, and as many as there are from this machine, since a reverse "
        "proxy on it brings many clients by one address and must bound them itself. A number holds "
        "for all addresses: behind a reverse proxy on another machine set it to max_connections.",
    )
    send_timeout_s: float = Field(
        30.0, gt=0, description="A client that takes nothing of its answer for so long is cut off."
    )
    cors_origins: tuple[str, ...] = Field((), description="Origins browsers may call from.")
    allowed_hosts: tuple[HostName, ...] = Field(
        (),
        description="Names, without ports, by which clients may ask for the server beside those "
        "of loopback; others are answered 403. None named: on loopback no others, elsewhere any.",
    )
    media_hosts: tuple[HostName, ...] = Field(
        (),
        description="Hosts, without ports, from which multimodal models may fetch the images, "
        "audio and video that a request links to; whatever its name leads to is reached from this "
        "machine. None named: media come within requests, as data: URLs.",
    )
    console: bool = Field(
        True,
        description="Serve the web console at /console. Its pages are open and show nothing by "
        "themselves; what they show, they ask the admin API for, with the admin token.",
    )
    audit_log: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="File with a line for each request for a change by the admin API, relative to "
        "this file; null: audit-PORT.log in the user's cache folder.",
    )
    usage: Usage = Field(
        Usage(), description="Keeps what each API key uses of each model, for accounting."
    )
    log_format: LogFormat = Field(
        "text",
        description="Of the logs of Serve's processes, in the run's folder. json: an object a "
        "line, with request_id, model and trace_id where it is about a request.",
    )
    tracing: Tracing | None = Field(
        None, description="Send traces of requests to a collector; null: there are none."
    )
    drain_timeout_s: float = Field(
        60.0, gt=0, description="How long unload, drain and stop wait for running requests."
    )
    front_ends: int = Field(
        1,
        ge=1,
        le=16,
        description="Processes that take requests at this address, each with the front ends of all "
        "models. Each takes some 1 GB, and a core where there are many streams. Limits hold over "
        "all of them; of max_body_total each has its share.",
    )

    @field_validator("media_hosts")
    @classmethod
    def _compared_in_lower_case(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(host.lower() for host in hosts)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def ports(self) -> tuple[int, ...]:
        """Where it listens: for clients, then for operators alone, if they have a port."""
        return (self.port,) if self.admin_port is None else (self.port, self.admin_port)

    @property
    def operators_port(self) -> int:
        """Where the admin API, the console and metrics are."""
        return self.ports[-1]

    @property
    def asks_for_keys(self) -> bool:
        """Whether nobody may ask without an API key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Server:
        if not (self.is_loopback or self.allow_unauthenticated or self.asks_for_keys):
            raise FieldError(
                f"{self.host!r} can be reached from other machines, so api_keys must be set "
                "(loomserve key create); or set allow_unauthenticated: true",
                "host",
            )
        if self.admin_port == self.port:
            raise FieldError(
                "is port, where clients ask: take another, or leave it out", "admin_port"
            )
        if self.max_body_total < self.max_body:
            raise FieldError(
                f"is less than max_body, {self.max_body} bytes, so that not one such body would "
                "be taken: raise it",
                "max_body_total",
            )
        if self.metrics_token_hash and self.metrics_token_hash == self.admin_token_hash:
            raise FieldError(
                "is the admin token's, which Prometheus should not have: make another one "
                "(loomserve key create), or leave it out",
                "metrics_token_hash",
            )
        return self

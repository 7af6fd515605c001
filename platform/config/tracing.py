"""The section ``server.tracing``."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from loomserve.platform.config.base import FieldError, Section

_ENDPOINT = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?(?P<path>/[!-~]*)?"
)
# A browser of an operator follows it: no other scheme.
_PAGE = re.compile(r"https?://[!-~]+")
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9._-]{1,64}$")]
HeaderValue = Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,4094}[!-~])?$")]


class Tracing(Section):
    """Traces of requests, which gateways send to a collector by OpenTelemetry's protocol (OTLP)."""

    endpoint: str = Field(
        description="URL of the collector, such as http://localhost:4317 for grpc or "
        "http://localhost:4318 for http/protobuf, of which /v1/traces is asked unless it has a "
        "path of its own. https: TLS, with the certificates that this machine trusts."
    )
    protocol: Literal["grpc", "http/protobuf"] = Field(
        "grpc", description="How spans travel to the collector."
    )
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the traces that begin here which are sent. A request that comes with "
        "a traceparent header is sent if that says so.",
    )
    headers: dict[HeaderName, HeaderValue] = Field(
        default_factory=dict,
        description="Headers for the collector, as for its key; then let no other user read this "
        "file.",
    )

    trace_url: str | None = Field(
        None,
        description="Page of the collector's that shows a trace, with {trace_id} in it, such as "
        "http://localhost:16686/trace/{trace_id}: where the console links to.",
    )

    @field_validator("trace_url")
    @classmethod
    def _names_a_trace(cls, url: str | None) -> str | None:
        if url is not None and (_PAGE.fullmatch(url) is None or "{trace_id}" not in url):
            raise ValueError(
                f"{url!r} is no page of a trace; write one such as "
                "http://localhost:16686/trace/{trace_id}"
            )
        return url

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str) -> str:
        if _ENDPOINT.fullmatch(endpoint) is None:
            raise ValueError(f"{endpoint!r} is no URL; write one such as http://localhost:4317")
        return endpoint

    @model_validator(mode="after")
    def _grpc_has_no_path(self) -> Tracing:
        if self.protocol == "grpc" and self._path not in ("", "/"):
            raise FieldError(
                f"has the path {self._path!r}, which grpc cannot ask for: leave it out, or set "
                "protocol: http/protobuf",
                "endpoint",
            )
        return self

    @property
    def url(self) -> str:
        """Where spans are sent."""
        if self._path not in ("", "/"):
            return self.endpoint
        base = self.endpoint.rstrip("/")
        return base if self.protocol == "grpc" else f"{base}/v1/traces"

    @property
    def _path(self) -> str:
        found = _ENDPOINT.fullmatch(self.endpoint)
        return (found["path"] or "") if found is not None else ""

"""Endpoint at which a prefill replica computes prompts for decode replicas."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loomserve.platform.disaggregation.engine.prefill_decode import PrefillDecodeLLM
from loomserve.platform.http.client_gone import ClientGoneError, while_connected


class PrefillEndpoint:
    """ASGI app that takes vLLM's encoded request and answers its encoded first output."""

    def __init__(self, llm: PrefillDecodeLLM) -> None:
        self._llm = llm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await Request(scope, receive).body()
        try:
            answer = await while_connected(self._llm.prefill(message), receive)
        except ClientGoneError:
            return
        await Response(answer, media_type="application/msgpack")(scope, receive, send)

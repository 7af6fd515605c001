"""What clients of a model that embeds get: vLLM's server of it, on an engine that is made up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from tests.unit.contracts.recordings import check, masked
from tests.unit.platform.front_end.engine.server import Server

pytestmark = pytest.mark.xdist_group("contracts")


class EmbeddingServer(Server):
    """Its engine embeds a text by its number of tokens."""

    def __init__(self) -> None:
        super().__init__(("embed",), runner="pooling", convert="embed")
        self.loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        llm = self._app.state.engine_client
        outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

        async def add(request: EngineCoreRequest) -> None:
            vector = torch.tensor([1.0, len(request.prompt_token_ids or ()) / 64])
            output = EngineCoreOutput(
                request.request_id, [], pooling_output=vector, finish_reason=FinishReason.STOP
            )
            await outputs.put(EngineCoreOutputs(outputs=[output]))

        llm.engine_core.add_request_async = add
        llm.engine_core.get_output_async = outputs.get
        llm._run_output_handler()


def test_clients_of_a_model_that_embeds_get_what_was_recorded() -> None:
    server = EmbeddingServer()
    told: dict[str, Any] = {}
    for path, body in (
        ("/v1/embeddings", {"input": "A loom"}),
        ("/v1/embeddings", {"input": ["A loom", "B"], "encoding_format": "base64"}),
        ("/v1/embeddings", {"input": "A loom", "dimensions": 5}),
        ("/v1/embeddings", {}),
        ("/v1/score", {"text_1": "A loom", "text_2": ["A", "Thread"]}),
        ("/v1/rerank", {"query": "A loom", "documents": ["A", "Thread", "Of"], "top_n": 2}),
        ("/v1/rerank", {"query": "A loom"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A loom"}]}),
    ):
        status, answer = server.ask(path, {"model": "m", **body})
        told[f"{path} {json.dumps(body)}"] = {"status": status, "body": json.loads(answer)}
    server.close()
    check("pooling", masked(told))

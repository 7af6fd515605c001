"""vLLM's server of a model as the gateway has it, with an engine that answers as a test says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from starlette.types import Message, Send
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from loomserve.platform.http.asgi import ON_LEFT, CollectedAnswer
from tests.unit.platform.front_end.engine.server import Server

_VOCABULARY = 20000


@dataclass
class Answering(Server):
    """Its answers' tokens are ``tokens``, each in a step of its own; its log probabilities depend
    on nothing but their place."""

    options: dict[str, Any] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    at_once: int = 1
    """Steps that come before anybody has looked."""
    is_behind: bool = False
    """Whether clients take nothing of a stream before the engine has answered all of it."""
    _work: list[asyncio.Task[None]] = field(default_factory=list)
    halt_s: float = 0.0
    """The longest turn of the event loop since an answer began, by the loop's own CPU time."""

    def __post_init__(self) -> None:
        Server.__init__(self, **self.options)
        self.client.add_request_async = self._take  # type: ignore[method-assign]
        self.loop.run_until_complete(self._start())
        state = self._app.state
        self._ours = [
            (state.openai_serving_chat, OpenAIServingChat),
            (state.openai_serving_completion, OpenAIServingCompletion),
            (state.openai_serving_responses, OpenAIServingResponses),
            (self.llm.output_processor, OutputProcessor),
        ]
        self._ours = [(one, type(one), stock) for one, stock in self._ours]  # type: ignore[misc]

    async def _start(self) -> None:
        self.llm._run_output_handler()
        self.llm.statistics.add(0)

    def answer(self, path: str, body: dict[str, Any], *, ours: bool) -> bytes:
        """The body of an answer, by the gateway's classes or by vLLM's own."""
        for one, own, stock in self._ours:  # type: ignore[misc]
            one.__class__ = own if ours else stock
        scoped = {ON_LEFT: []} if ours else {}
        content = json.dumps({"model": "m", **body}).encode()
        status, answered = self.loop.run_until_complete(self._watched(path, content, scoped))
        assert status == 200, answered
        return answered

    async def _watched(
        self, path: str, content: bytes, scoped: dict[str, Any]
    ) -> tuple[int, bytes]:
        self.halt_s = 0.0
        watch = asyncio.create_task(self._watch())
        try:
            # Context variables are a request's own, as in the gateway.
            return await asyncio.create_task(self._ask(path, content, **scoped))
        finally:
            await asyncio.sleep(0)
            watch.cancel()

    def _sent_to(self, answer: CollectedAnswer) -> Send:
        async def send(message: Message) -> None:
            if self.is_behind and message.get("body") and self._work:
                await asyncio.wait(self._work)
            await answer.send(message)

        return send

    async def _watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.halt_s, before = max(self.halt_s, now - before), now

    async def _take(self, request: EngineCoreRequest) -> None:
        self._work.append(asyncio.create_task(self._give(request)))

    async def _give(self, request: EngineCoreRequest) -> None:
        for number, output in enumerate(self._outputs(request), 1):
            self.client.outputs_queue.put_nowait(EngineCoreOutputs(outputs=[output], timestamp=1.0))
            if number % self.at_once == 0:
                for _ in range(16):
                    await asyncio.sleep(0)

    def _outputs(self, request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        params, random = request.sampling_params, np.random.default_rng(1)
        assert params is not None
        assert params.max_tokens is not None
        tokens = list(self.tokens[: params.max_tokens])
        for number, token in enumerate(tokens):
            output = EngineCoreOutput(request.request_id, [token])
            if number == len(tokens) - 1:
                output.finish_reason = FinishReason.LENGTH
            if params.logprobs is not None:
                ids, values = _some(random, [token], params.logprobs)
                output.new_logprobs = LogprobsLists(ids, values, np.array([1]), None)
            if number == 0 and params.prompt_logprobs is not None:
                of = (request.prompt_token_ids or [])[1:]
                ids, values = _some(random, of, params.prompt_logprobs)
                output.new_prompt_logprobs_tensors = LogprobsTensors(
                    torch.tensor(ids), torch.tensor(values), torch.ones(len(of), dtype=torch.int32)
                )
            yield output


def _some(random: np.random.Generator, tokens: Sequence[int], others: int) -> tuple[Any, Any]:
    """Tokens with others beside each, and log probabilities, some of which are minus infinity."""
    beside = random.integers(300, _VOCABULARY, (len(tokens), others))
    ids = np.concatenate([np.array(tokens, dtype=np.int64)[:, None], beside], 1)
    values = -random.random(ids.shape)
    values[random.random(ids.shape) < 0.05] = float("-inf")
    return ids, values

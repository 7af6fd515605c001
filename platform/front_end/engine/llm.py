"""vLLM's engine front end on an engine client of ours, which needs no engine to be there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tracing import init_tracer
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from loomserve.platform.disaggregation.metrics import HandoffMetrics
from loomserve.platform.front_end.engine.answers.late_logprobs import with_logprobs
from loomserve.platform.front_end.engine.answers.texts import AnswerTexts
from loomserve.platform.front_end.engine.grammar_checks import GrammarChecks, compiled
from loomserve.platform.front_end.engine.replica import ConnectedReplica
from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
from loomserve.platform.front_end.engine.statistics import ReplicaStatistics
from loomserve.platform.requests.policy.logprobs import MOST_AT_ONCE, MOST_IN_A_CHUNK, most_tokens
from loomserve.platform.simulated.options import SIMULATED_CONFIG, refusal

# Any number but one tells vLLM not to keep what it has sent of images from an engine, which only
# works if each request goes to the engine that the one before it went to.
_SEVERAL_PROCESSES = 2
_COMPLETION = "cmpl-"
"""What vLLM's ids of requests to ``/v1/completions`` begin with."""


class FrontEndLLM(AsyncLLM):  # type: ignore[misc]
    """An ``AsyncLLM`` of one model, on a client that has its replicas. vLLM's constructor makes its
    own client, so this one repeats the rest of it."""

    engine_core: ReplicaSetClient

    def __init__(
        self,
        vllm_config: VllmConfig,
        client: ReplicaSetClient,
        *,
        log_requests: bool = False,
        traced: bool = False,
    ) -> None:
        """``traced``: vLLM's spans go where this process's do."""
        maybe_register_config_serialize_by_value()
        vllm_config.parallel_config._api_process_count = _SEVERAL_PROCESSES
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        traces_to = self.observability_config.otlp_traces_endpoint
        if traced:
            # vLLM takes traces out of headers where it has somebody to tell of them.
            self.observability_config.otlp_traces_endpoint = traces_to or "this process's"
        elif traces_to is not None:
            init_tracer("vllm.llm_engine", traces_to)
        self._elastic_ep_lock = asyncio.Lock()
        self._client_count = 1
        self.log_requests = log_requests
        self.log_stats = True
        self.profiler = None
        self._frontend_profiler_injected = False
        self._frontend_profiler_worker_name = ""
        self._profile_lock = asyncio.Lock()
        # Other front ends have the same engines, and may profile them.
        self._profile_session_guard_enabled = False
        self._profile_session_active = False
        self.admission_stats = None
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.output_processor = AnswerTexts(
            self.renderer.tokenizer,
            log_stats=True,
            stream_interval=vllm_config.scheduler_config.stream_interval,
            tracing_enabled=self.observability_config.otlp_traces_endpoint is not None,
        )
        self.logger_manager = self.statistics = ReplicaStatistics(vllm_config)
        self.output_handler = None
        self._grammars = GrammarChecks(self.input_processor)
        self._is_simulated = SIMULATED_CONFIG in vllm_config.additional_config
        self.engine_core = client
        client.on_ready = self._replica_ready
        client.on_removed = lambda replica: self.statistics.remove(replica.index)
        client.requests.on_failed = self._request_failed
        client.handoffs.metrics_of = self._handoff_metrics

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_simulated and (why := refusal(params)) is not None:
            raise VLLMValidationError(why)
        if isinstance(params, SamplingParams):
            _bound_logprobs(prompt, params)
        if request_id.startswith(_COMPLETION) and not isinstance(prompt, AsyncGenerator):
            # Its text is one: vLLM would hold none of it to a grammar before reasoning has ended.
            kwargs["reasoning_ended"] = True
        add: Callable[..., Any] = super().add_request
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return await add(request_id, prompt, params, *args, **kwargs)
        checked = await self._grammars.check(params, await self.get_supported_tasks())
        with self._grammars.known(params, checked):
            return await add(request_id, prompt, params, *args, **kwargs)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs = super().generate(prompt, sampling_params, *args, **kwargs)
        # One layer more would cost each token of all other requests.
        if (sampling_params.logprobs, sampling_params.prompt_logprobs) != (None, None):
            outputs = with_logprobs(outputs)
        return outputs if sampling_params.structured_outputs is None else compiled(outputs)

    @property
    def errored(self) -> bool:
        """Whether the front end itself has failed: a model without a replica has not."""
        return not self.is_running

    def page(self, replica_id: str) -> str | None:
        """A replica's metrics as text; None: it is not connected."""
        replica = self.engine_core.replicas.get(replica_id)
        return None if replica is None else self.statistics.page(replica.index, *replica.load)

    def _handoff_metrics(self, replica_id: str) -> HandoffMetrics | None:
        replica = self.engine_core.replicas.get(replica_id)
        return None if replica is None else self.statistics.handoffs(replica.index)

    def _replica_ready(self, replica: ConnectedReplica) -> None:
        """Take over what an engine knows only once it has its memory."""
        facts = replica.facts
        assert facts is not None
        model, cache = self.model_config, self.vllm_config.cache_config
        model.max_model_len = min(model.max_model_len, facts.max_model_len)
        cache.num_gpu_blocks = facts.num_gpu_blocks
        cache.block_size = facts.block_size
        cache.mamba_block_size = facts.mamba_block_size
        cache.kv_cache_size_tokens = facts.kv_cache_size_tokens
        cache.kv_cache_max_concurrency = facts.kv_cache_max_concurrency
        self.statistics.add(replica.index)

    def _request_failed(self, request_id: str, error: Exception) -> None:
        # Once all answers to its prompt have been added, which happens in one go.
        asyncio.get_running_loop().call_soon(self._fail, request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        """End one request, with the other answers to its prompt, by raising in its generator."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return
        if state.queue is not None:
            state.queue.put(error)
        whole = request_id if state.parent_req is None else state.parent_req.request_id
        aborted = self.output_processor.abort_requests([whole], internal=True)
        self.engine_core.requests.abort(aborted)


def _bound_logprobs(prompt: Any, params: SamplingParams) -> None:
    """Bound log probabilities of a prompt (or raise VLLMValidationError), and of an answer."""
    at_once = params.output_kind is RequestOutputKind.FINAL_ONLY
    if params.prompt_logprobs is not None:
        tokens = len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, dict) else 0
        # A stream echoes its prompt in one chunk.
        in_one = MOST_AT_ONCE if at_once else MOST_IN_A_CHUNK
        if (most := most_tokens(params.prompt_logprobs, 1, in_one)) < tokens:
            raise VLLMValidationError(
                f"With {params.prompt_logprobs} log probabilities for each token a prompt may have "
                f"{most} tokens, and this one has {tokens}. Ask for fewer, or shorten it.",
                parameter="prompt_logprobs",
            )
    if params.logprobs is not None and at_once and params.max_tokens is not None:
        most = most_tokens(params.logprobs, params.n)
        params.max_tokens = max(min(params.max_tokens, most), params.min_tokens)

"""vLLM's OpenAI server of one model, on its replicas' engines; a process has several.

::

    client = ReplicaSetClient("chat", choose, metrics.of("chat"))
    serving = ModelServing("chat", options, client)
    await serving.start()
    client.set_replicas({"r1": EngineAddress(...), "r2": EngineAddress(...)})
    await serving.app(scope, receive, send)
    await client.drain("r1", timeout_s=10)
    await serving.close()
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.envs import enable_envs_cache
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin, maybe_make_thread_pool
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreReadyResponse

from loomserve.platform.adapters.messages import AdapterRoute
from loomserve.platform.base import heap
from loomserve.platform.base.errors import ConfigError, Unavailable
from loomserve.platform.engine.options.engine_config import look_at_class, structured
from loomserve.platform.engine.options.known import in_fields
from loomserve.platform.front_end.engine.answers.endpoints import answer_directly
from loomserve.platform.front_end.engine.answers.inputs import check_inputs
from loomserve.platform.front_end.engine.answers.messages import use_messages
from loomserve.platform.front_end.engine.answers.tool_calls import correct_tool_calls
from loomserve.platform.front_end.engine.input_errors import bound_input_errors
from loomserve.platform.front_end.engine.llm import FrontEndLLM
from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
from loomserve.platform.http.engine_errors import no_replica

_log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# vLLM's configuration and tokenizers are not made to be loaded by several threads at once.
_ONE_AT_A_TIME = asyncio.Lock()


# What vLLM's server has before its endpoints for clients of its own, and the gateway has itself.
# Each is one more call for each chunk.
_OF_A_SERVER = {"AuthenticationMiddleware", "CORSMiddleware", "PrometheusInstrumentatorMiddleware"}
# vLLM would keep a query with one engine, while its documents go to any; and it would not render.
_ALWAYS = {"enable_flash_late_interaction": False, "enable_scale_out": True}


def settle_environment() -> None:
    """Have vLLM read its environment variables once, not several times a token."""
    enable_envs_cache()


async def server_app(llm: FrontEndLLM, args: Any, tasks: tuple[Any, ...]) -> Any:
    """vLLM's app of a model, as the gateway has it; ``args`` are those of vLLM's server."""
    app = build_app(args, supported_tasks=tasks, model_config=llm.model_config)
    app.user_middleware = [
        each for each in app.user_middleware if each.cls.__name__ not in _OF_A_SERVER
    ]
    bound_input_errors(app)
    app.middleware_stack = app.build_middleware_stack()
    use_messages()
    await init_app_state(llm, app.state, args, tasks)
    check_inputs(app.state)
    correct_tool_calls(app.state)
    answer_directly(app)
    # vLLM would end its own server by it when its only engine has failed.
    app.state.server = SimpleNamespace()
    return app


class ModelServing:
    """The front end of one model."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        client: ReplicaSetClient,
        *,
        traced: bool = False,
    ) -> None:
        """``options``: vLLM's, of its server and of the engine, as the replicas' engines were
        started with, ``model`` among them. ``traced``: vLLM makes a span of each request by this
        process's tracer."""
        self._name = name
        self._traced = traced
        self._options = options
        self._wait_s = client.requests.bounds.reroute_timeout_s
        self.client = client
        self._llm: FrontEndLLM | None = None
        self._args: Any = None
        self._models: Any = None
        """vLLM's, of the names that clients may ask for; None: the app is not there yet."""
        self._app: asyncio.Task[Any] | None = None
        self.tasks: tuple[str, ...] = ()
        """What engines of the model can do, in vLLM's words; empty: none has said yet."""

    async def start(self) -> None:
        """Load configuration, tokenizer and templates; raises ConfigError for wrong options."""
        async with _ONE_AT_A_TIME:
            self._llm = await asyncio.to_thread(self._load)
        self._llm._run_output_handler()
        self._app = asyncio.create_task(self._build(self._llm))

    def _load(self) -> FrontEndLLM:
        self._args, config = server_options(self._name, self._options)
        share_tokenizer(config.model_config)
        if config.model_config.has_inner_state:
            book = self.client.requests
            book.bounds = replace(book.bounds, resumes=False)
        log_requests = self._args.enable_log_requests
        llm = FrontEndLLM(config, self.client, log_requests=log_requests, traced=self._traced)
        # Reading a tokenizer leaves much of it behind.
        heap.give_back_freed()
        return llm

    async def _build(self, llm: FrontEndLLM) -> Any:
        """vLLM's app, as soon as an engine has said what it can do."""
        while True:
            try:
                await self.client.wait_for_replica(self._wait_s)
                tasks = await llm.get_supported_tasks()
                break
            except Unavailable:
                continue
            except Exception:  # of the engine that was asked; another may come
                _log.exception("an engine of model %s did not say what it can do", self._name)
                await asyncio.sleep(1)
        self.tasks = tuple(tasks)
        app = await server_app(llm, self._args, tasks)
        self._models = app.state.openai_serving_models
        self.client.adapters.serve_by(self._models)
        heap.keep_heap()
        return app

    @property
    def llm(self) -> EngineClient:
        assert self._llm is not None, "start() comes first"
        return self._llm

    @property
    def failed(self) -> bool:
        """Whether the front end itself has failed, and has to be replaced."""
        return self._llm is not None and self._llm.errored

    @property
    def replicas(self) -> dict[str, EngineCoreReadyResponse]:
        """The connected replicas, with what their engines said of themselves."""
        return {key: each.facts for key, each in self.client.replicas.items()}

    def page(self, replica_id: str) -> str | None:
        """vLLM's metrics of a replica as text, without the labels of model, replica and device."""
        return None if self._llm is None else self._llm.page(replica_id)

    async def app(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI app; raises Unavailable if the model has no replica in time."""
        app = await self.server()
        await app(scope, receive, send)

    async def server(self) -> Any:
        """vLLM's app, once a replica has said what the model can do; raises Unavailable."""
        assert self._app is not None, "start() comes first"
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(self._app)
        except TimeoutError:
            raise no_replica(self._name) from None

    def set_adapters(self, routes: Iterable[AdapterRoute]) -> None:
        self.client.adapters.set(routes)
        if self._models is not None:
            self.client.adapters.serve_by(self._models)

    async def close(self) -> None:
        if self._app is not None:
            self._app.cancel()
        if self._llm is not None:
            self._llm.shutdown()
        else:
            self.client.shutdown()
        await self.client.closed()


def server_options(name: str, options: Mapping[str, Any]) -> tuple[Namespace, VllmConfig]:
    """vLLM's arguments of a server, and its configuration, parsed as its command line would be.

    ``options`` are fields of ``AsyncEngineArgs`` and ``FrontendArgs``, ``model`` among them;
    structured ones may be mappings. Raises ConfigError if vLLM refuses them or lacks a package for
    the model.
    """
    look_at_class(options)
    of_front_end = {field.name for field in dataclasses.fields(FrontendArgs)}
    front_end = {key: value for key, value in options.items() if key in of_front_end}
    engine = {key: value for key, value in options.items() if key not in of_front_end}
    engine = {"enable_log_requests": False, **engine, "served_model_name": [name]}
    try:
        engine_args = AsyncEngineArgs(**structured(engine))
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        front_end_args = FrontendArgs(**{**front_end, **_ALWAYS})
    except (TypeError, ValueError) as error:
        why = in_fields(str(error))
        raise ConfigError(f"model {name!r}: vLLM refuses its engine options: {why}") from error
    # A few options are both the server's and the engine's.
    return Namespace(**vars(front_end_args) | vars(engine_args)), config


def share_tokenizer(model_config: ModelConfig) -> None:
    """Have all front ends of a model share the copies of its tokenizer; called before one is made.

    vLLM copies the whole tokenizer for each thread of each front end: tens of megabytes for a name,
    hundreds with a large vocabulary. Copies keep no state between calls, and a thread that finds
    none free makes one more.
    """
    if model_config.skip_tokenizer_init or model_config.enable_prompt_embeds:
        return  # there is none, or each front end adds a word to its own
    tokenizer = cached_tokenizer_from_config(model_config)
    maybe_make_thread_pool(tokenizer, model_config.renderer_num_workers + 1)
    if isinstance(tokenizer, ThreadSafeHFTokenizerMixin):
        type(tokenizer).__copy__ = _itself


def _itself(tokenizer: Any) -> Any:
    return tokenizer

"""An engine's process, and clients of bare sockets that ask it and put tokens together."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from loomserve.platform.config import Device
from loomserve.platform.devices.binding import engine_environment
from loomserve.platform.engine.core.addresses import BEAT, DEAD, HELLO, READY
from loomserve.platform.engine.core.host import EngineHost
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.engine.process.engine_process import engine_modules
from loomserve.platform.engine.resumption.travelling import RESUMED, by_age
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.run.folder import RUN_VARIABLE
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG
from loomserve.platform.state.load_report import LoadReport, read_load_report
from tests.fork_servers import fork_server_of
from tests.forks import FORKS_VARIABLE
from tests.integration.cores import core
from tests.waiting import PATIENCE_S

T = TypeVar("T")

# Not even a client of a test that waits for a core is let go.
SILENCE_S = 120.0
QUEUED = 20
START_S = 180.0


@functools.cache
def fork_server() -> Path:
    """The folder of a run whose fork server imports vLLM once for all engines of all tests."""
    if FORKS_VARIABLE in os.environ:
        return Path(os.environ[FORKS_VARIABLE])
    running = contextlib.ExitStack()
    folder, _ = running.enter_context(fork_server_of(engine_modules("cpu")))
    atexit.register(running.close)
    return Path(folder)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Within it engines are forked."""
    os.environ[RUN_VARIABLE] = str(fork_server())
    try:
        yield
    finally:
        del os.environ[RUN_VARIABLE]


class ServedEngine:
    """An engine and the event loop of its host, which has a thread of its own."""

    def __init__(
        self, start: EngineStart, environment: Mapping[str, str], *, fork: bool = True
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        with forking():
            started = EngineHost.start(start, environment, START_S, fork=fork)
            self.host: EngineHost = self.run(started)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(START_S + 10)

    @property
    def address(self) -> EngineAddress:
        return self.host.address

    def end(self) -> None:
        self.run(self.host.stop(10))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)


def engine_start(
    model: str, folder: Path, silence_s: float = SILENCE_S, **options: Any
) -> EngineStart:
    return EngineStart(
        options={
            "model": model,
            "served_model_name": ["demo"],
            # On every machine, and whoever is in the batch, the same tokens.
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            # Prompts are computed in parts.
            "max_num_batched_tokens": 64,
            "block_size": 32,
            "kv_cache_memory_bytes": 96 * 2**20,
            "worker_cls": "loomserve.platform.engine.worker.NonSpinningWorker",
            "scheduler_cls": "loomserve.platform.engine.scheduler.make_scheduler",
            "additional_config": {ADDITIONAL_CONFIG: {}},
            **options,
        },
        address=EngineAddress.in_folder(folder),
        silence_s=silence_s,
        queued=QUEUED,
    )


def environment(number: int = 0) -> dict[str, str]:
    """Of an engine on the test's core of this number."""
    return {
        **engine_environment(Device(name="here", cores=(core(number),))),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }


@contextlib.contextmanager
def served(
    start: EngineStart, number: int = 0, *, fork: bool = True, **more: str
) -> Iterator[ServedEngine]:
    """One that runs on the test's core of this number, with ``more`` in its environment."""
    engine = ServedEngine(start, {**environment(number), **more}, fork=fork)
    try:
        yield engine
    finally:
        engine.end()


@dataclass
class Stream:
    """What has come of one request's answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    """Of each token, those that were asked for, by token."""
    finish: str | None = None
    events: list[int] = field(default_factory=list)
    prefills: int = 0
    came_at: list[float] = field(default_factory=list)

    def take(self, output: Any) -> None:
        self.tokens += output.new_token_ids
        self.came_at += [time.monotonic()] * len(output.new_token_ids)
        self.events += [int(event.type) for event in output.events or ()]
        self.prefills += output.prefill_stats is not None
        if output.new_logprobs is not None:
            told = output.new_logprobs
            for ids, values in zip(told.logprob_token_ids, told.logprobs, strict=True):
                self.logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
        if output.finish_reason is not None:
            self.finish = str(output.finish_reason)


class BareClient:
    """A pair of DEALERs; :meth:`pump` says that it is there and takes what comes."""

    def __init__(
        self, address: EngineAddress, identity: bytes | None = None, high_water: int = 0
    ) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.identity = identity or uuid.uuid4().hex.encode()
        self.connection = os.urandom(4)
        self.streams: dict[str, Stream] = {}
        self.ready: list[Any] = []
        self.beats: list[list[int]] = []
        self.loads: list[tuple[float, LoadReport]] = []
        """With when each came, in monotonic seconds."""
        self.dead = False
        self.preempted_hits = self.stored_hits = 0
        self._hello_at = 0.0
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._context: zmq.Context[Any] = zmq.Context()
        self.input, self.output = (
            self._dealer(each, high_water) for each in (address.input, address.output)
        )

    def _dealer(self, address: str, high_water: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, high_water)
        socket.setsockopt(zmq.IDENTITY, self.identity)
        socket.connect(address)
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hello(self) -> None:
        if time.monotonic() - self._hello_at > 0.5:
            self._hello_at = time.monotonic()
            self.output.send_multipart([HELLO, self.connection])

    def add(self, prompt: Sequence[int], resumed: Sequence[int] = (), **params: Any) -> str:
        """Ask for an answer; returns the request's id.

        ``resumed`` are the tokens so far, ``salt`` keeps its KV apart from that of others, and
        ``adapter`` is vLLM's LoRARequest.
        """
        from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType

        name = uuid.uuid4().hex
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=sampling(resumed, params),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=params.get("adapter"),
            cache_salt=params.get("salt"),
            data_parallel_rank=None,
            # It is the engine that knows a client's index.
            client_index=7,
        )
        self.streams[name] = Stream()
        frames = [EngineCoreRequestType.ADD.value, *self._encoder.encode(by_age(request))]
        self.input.send_multipart(frames, copy=False)
        return name

    def abort(self, *names: str) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self.input.send_multipart(
            [EngineCoreRequestType.ABORT.value, *self._encoder.encode(list(names))]
        )

    def pump(self) -> None:
        """Take what has come, without waiting."""
        self.hello()
        while self.output.poll(0):
            self._take(self.output.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        if frames[0] == READY:
            self.ready.append(msgspec.msgpack.decode(frames[1]))
        elif frames[0] == BEAT:
            self.beats.append(msgspec.msgpack.decode(frames[1]))
        elif frames == [DEAD]:
            self.dead = True
        else:
            if (load := read_load_report(frames[0])) is not None:
                self.loads.append((time.monotonic(), load))
                frames = frames[1:]
            if not frames:
                return
            outputs = self._decoder.decode(frames)
            for output in outputs.outputs:
                self.streams[output.request_id].take(output)
            if outputs.scheduler_stats is not None:
                self._count_hits(outputs.scheduler_stats)

    def _count_hits(self, stats: Any) -> None:
        if (local := stats.prefix_cache_stats) is not None:
            self.preempted_hits += local.preempted_hits
        if (stored := stats.connector_prefix_cache_stats) is not None:
            self.stored_hits += stored.preempted_hits


def sampling(resumed: Sequence[int], params: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = {
        name: value for name, value in params.items() if name not in ("salt", "schema", "adapter")
    }
    made = SamplingParams(
        **{"max_tokens": 48, "temperature": 0.0, **given},
        extra_args={RESUMED: list(resumed)} if resumed else None,
    )
    if "schema" in params:
        made.structured_outputs = StructuredOutputsParams(json=params["schema"])
        made.structured_outputs._backend = "xgrammar"
    # SmolLM2's end of text, as vLLM's client would set it.
    made.update_from_generation_config({}, 0)
    return made


def pump_until(condition: Callable[[], bool], *clients: BareClient, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "nothing more came"
        for each in clients:
            each.pump()
        time.sleep(0.002)


@contextlib.contextmanager
def connected(address: EngineAddress, **how: Any) -> Iterator[BareClient]:
    """A client that the engine has greeted."""
    client = BareClient(address, **how)
    try:
        pump_until(lambda: bool(client.ready), client, within_s=10)
        yield client
    finally:
        client.close()


def answers(client: BareClient, names: Sequence[str], within_s: float = 60.0) -> list[Stream]:
    """The answers to these requests, once all are whole."""
    pump_until(
        lambda: all(client.streams[name].finish for name in names), client, within_s=within_s
    )
    return [client.streams[name] for name in names]

"""An engine's side of the wire, which computes nothing: a token is its position in the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from loomserve.platform.engine.core.addresses import BEAT, DEAD, READY
from loomserve.platform.engine.core.departures import asking
from loomserve.platform.engine.core.network_sockets import NetworkSockets
from loomserve.platform.engine.resumption.travelling import RESUMED
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state.load_report import LoadReport

FACTS = EngineCoreReadyResponse(
    max_model_len=512, num_gpu_blocks=10, block_size=16, dp_stats_address=None, dtype="float32",
    vllm_version="", world_size=1, data_parallel_size=1, tensor_parallel_size=1,
    pipeline_parallel_size=1, decode_context_parallel_size=1, data_parallel_rank=0, max_num_seqs=8,
    max_num_batched_tokens=64, instance_id="", supports_lora=False, max_loras=0,
)  # fmt: skip


@dataclass
class Work:
    request: EngineCoreRequest
    tokens: list[int]


@dataclass
class PeerEngine:
    """A test says what it does: it answers only when told to step."""

    folder: Path
    silent: bool = False
    """It sends nothing."""
    hangs: bool = False
    """It takes in nothing, and answers only HELLO."""
    added: list[EngineCoreRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    work: dict[str, Work] = field(default_factory=dict)
    steps: int = 0
    prefill_stats: PrefillStats | None = None
    """Of the next output."""
    tells_load: bool = False
    """With its outputs."""
    kv_transfer: dict[str, Any] | None = None
    """What its connector tells with a request's last output."""
    network: NetworkSockets | None = None
    """It listens at a node's address, too."""

    def __post_init__(self) -> None:
        self.address = EngineAddress.in_folder(self.folder)
        self._bound = ExitStack()
        self._known: dict[bytes, bytes] = {}
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._other = MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._tasks: list[asyncio.Task[None]] = []
        self.arrived = asyncio.Event()

    def start(self) -> PeerEngine:
        self._input, self._output = (
            self._socket(name, address)
            for name, address in (("input", self.address.input), ("output", self.address.output))
        )
        if self.network is not None:
            self.address = self.address.with_network(self.network.address)
        self._tasks = [asyncio.create_task(each) for each in (self._hear(), self._take())]
        return self

    def _socket(self, name: str, address: str) -> zmq.asyncio.Socket:
        if self.network is None:
            context = zmq.asyncio.Context.instance()
        else:
            # Who asks for keys does so for all sockets of a context.
            context = zmq.asyncio.Context()
            self._bound.callback(context.destroy, linger=0)
        socket = context.socket(zmq.ROUTER)
        self._bound.callback(socket.close, linger=0)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        socket.bind(address)
        if self.network is not None:
            self._bound.enter_context(self.network.bound(name, context, socket))
        return socket

    def end(self) -> None:
        """As when its process is killed."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._bound.close()
        self.address.remove()

    async def _hear(self) -> None:
        while True:
            identity, _, connection = await self._output.recv_multipart()
            if self.silent:
                continue
            if self._known.get(identity) == connection:
                state = [self.steps, len(self.work), 0]
                await self._output.send_multipart([identity, BEAT, msgspec.msgpack.encode(state)])
            else:
                self._known[identity] = connection
                await self._output.send_multipart([identity, READY, msgspec.msgpack.encode(FACTS)])

    def forget(self) -> None:
        """Let all front ends go."""
        self._known.clear()
        self.work.clear()

    async def say_dead(self) -> None:
        for identity in self._known:
            await self._output.send_multipart([identity, DEAD])

    async def _take(self) -> None:
        while True:
            identity, kind, *data = await self._input.recv_multipart(copy=False)
            if kind.buffer == EngineCoreRequestType.ADD.value:
                request = self._decoder.decode(data)
                extra = (request.sampling_params and request.sampling_params.extra_args) or {}
                self.added.append(request)
                self.work[request.request_id] = Work(request, list(extra.get(RESUMED, ())))
            elif kind.buffer == EngineCoreRequestType.ABORT.value:
                gone = self._other.decode(data)
                self.aborted += gone
                for each in gone:
                    self.work.pop(each, None)
            else:
                _, call_id, method, args = self._other.decode(data)
                result = UtilityOutput(call_id, None, UtilityResult([method, *args]))
                await self._send(EngineCoreOutputs(utility_output=result), identity.bytes)
            self.arrived.set()

    async def step(
        self, count: int = 1, *, finish: FinishReason | None = None, tokens: int = 1
    ) -> None:
        """So many steps: each gives each request a token, and ends those long enough."""
        for _ in range(count):
            self.steps += 1
            outputs = [self._next(wire_id, finish, tokens) for wire_id in list(self.work)]
            await self._send(EngineCoreOutputs(outputs=outputs))

    async def ask_to_move(self, to: str, *wire_ids: str) -> None:
        """Ask that these requests go on with the replica ``to``."""
        await self._send(EngineCoreOutputs(outputs=[asking(each, to) for each in wire_ids]))

    def _next(self, wire_id: str, finish: FinishReason | None, most: int) -> EngineCoreOutput:
        work = self.work[wire_id]
        params = work.request.sampling_params
        token = len(work.tokens)
        work.tokens.append(token)
        full = params is not None and len(work.tokens) >= params.max_tokens
        if finish is None and full:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self.work[wire_id]
        tokens = [] if finish is FinishReason.ABORT else [token][:most]
        told, self.prefill_stats = self.prefill_stats, None
        return EngineCoreOutput(
            wire_id,
            tokens,
            finish_reason=finish,
            prefill_stats=told,
            kv_transfer_params=self.kv_transfer if finish is not None else None,
        )

    async def _send(self, outputs: EngineCoreOutputs, to: bytes | None = None) -> None:
        frames: Sequence[Any] = self._encoder.encode(outputs)
        if self.tells_load:
            load = LoadReport(self.steps, len(self.added), len(self.work), 5, 0.5)
            frames = [load.frame(), *frames]
        for identity in self._known if to is None else [to]:
            await self._output.send_multipart([identity, *frames])

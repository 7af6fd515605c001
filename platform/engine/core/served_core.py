"""vLLM's engine core for clients that come and go, and for the replica that started it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, takewhile
from typing import Any

import msgspec
import zmq
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.executor import Executor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder

from loomserve.platform.engine.adapters.loaded import EngineAdapters
from loomserve.platform.engine.core.cores import leave_device
from loomserve.platform.engine.core.departures import Departures, asking, movable
from loomserve.platform.engine.core.engine_clients import EngineClients
from loomserve.platform.engine.core.messages import EngineFacts, EngineStart
from loomserve.platform.engine.core.metering import CoreMeter
from loomserve.platform.engine.core.network_sockets import NetworkSockets
from loomserve.platform.engine.core.output_sender import OutputSender, WakingQueue, bound_router
from loomserve.platform.engine.core.request_receiver import RequestReceiver
from loomserve.platform.engine.resumption.travelling import by_own_clocks, check_resumed
from loomserve.platform.engine.sleeping.sleep import EngineSleep
from loomserve.platform.scheduling.policy.preemption import leaving
from loomserve.platform.state.load_report import LoadBook

_logger = logging.getLogger(__name__)

_BETWEEN_STEPS = "between steps"
_cpu_s = time.process_time


class ServedEngineCore(EngineCoreProc):  # type: ignore[misc]
    """EngineCore whose sockets are bound, so that any number of clients connect to them.

    vLLM's own is made for clients that it knows at its start, and ends with them. Its two I/O
    threads are overridden; the loop, the steps and the frames are vLLM's.
    """

    def __init__(
        self, config: VllmConfig, executor_class: type[Executor], start: EngineStart
    ) -> None:
        self._start = start
        self._network = NetworkSockets(start.host)
        self.steps = 0
        self.meter, self.loads = CoreMeter.of(config), LoadBook()
        self._departures = Departures()
        self._sleep = EngineSleep(self)
        self._adapters = EngineAdapters(self)
        self._clients = EngineClients(start.silence_s)
        self._ready: bytes
        self._is_ready = threading.Event()
        self._encoder = MsgpackEncoder()
        super().__init__(
            vllm_config=config,
            local_client=True,
            handshake_address="",
            executor_class=executor_class,
            log_stats=True,
        )

    @contextmanager
    def _perform_handshakes(self, *_: Any, **__: Any) -> Iterator[EngineZmqAddresses]:
        # As vLLM's own Ray actors do: the addresses are known. Nothing is in the queue yet.
        self.output_queue: WakingQueue = WakingQueue()
        address = self._start.address
        yield EngineZmqAddresses(inputs=[address.input], outputs=[address.output])

    # vLLM's two threads

    def process_input_sockets(
        self,
        input_addresses: list[str],
        coord_input_address: str | None,
        identity: bytes,
        ready_event: threading.Event,
    ) -> None:
        leave_device()
        # It mirrors the cache of a single client. Here each sends what it has whole.
        self.mm_receiver_cache = None
        self._ready = msgspec.msgpack.encode(self._make_ready_response())
        with (
            zmq.Context() as context,
            bound_router(context, self._start.address.input) as socket,
            self._network.bound("input", context, socket),
        ):
            self._is_ready.set()
            ready_event.set()
            with self._fatal("reads requests"):
                RequestReceiver(self, self._clients).run(socket)

    def process_output_sockets(self, *_: Any) -> None:
        leave_device()
        self._is_ready.wait()
        with self._fatal("sends outputs"):
            sender = OutputSender(self.output_queue, self._clients, self)
            also = partial(self._network.bound, "output")
            sender.run(self._start.address.output, self._start.queued, also)

    @contextmanager
    def _fatal(self, work: str) -> Iterator[None]:
        """End the engine if a thread ends without which nobody can speak to it."""
        try:
            yield
        except Exception as error:
            _logger.exception("the thread that %s has ended", work)
            message = f"the thread that {work} has ended: {error}"

            def end() -> None:
                raise RuntimeError(message)

            self.between_steps(end)

    # What the sender asks for and tells

    def ready_response(self) -> bytes:
        return self._ready

    def beat(self) -> bytes:
        return msgspec.msgpack.encode([self.steps, *self.scheduler.get_request_counts(), _cpu_s()])

    def encode(self, outputs: EngineCoreOutputs) -> Sequence[Any]:
        outputs.engine_index = self.engine_index
        frames: Sequence[Any] = self._encoder.encode(outputs)
        return frames

    def gone(self, index: int) -> None:
        def end() -> None:
            self._abort_all_of(index)
            self.loads.gone(index)

        self.between_steps(end)

    def unwanted(self, outputs: EngineCoreOutputs) -> None:
        # Requests that were on their way while their client was let go.
        left = [each.request_id for each in outputs.outputs if not each.finished]
        if left:
            self.between_steps(lambda: self.abort_requests(left))

    def _abort_all_of(self, index: int) -> None:
        requests = self.scheduler.requests.values()
        left = [each.request_id for each in requests if each.client_index == index]
        if left:
            _logger.info("an engine client is gone; its %d requests end", len(left))
            self.abort_requests(left)

    # Requests that are to go on elsewhere

    def move_requests(self, to: str, most: int) -> int:
        """Ask clients to have at most so many requests go on with the replica ``to``. Returns how
        many were asked for; :meth:`moved` tells what came of it."""
        requests = self.scheduler.requests
        chosen = leaving(movable(requests.values()), most)
        self._departures.ask(chosen)
        told = defaultdict[int, list[EngineCoreOutput]](list)
        for request_id in chosen:
            told[requests[request_id].client_index].append(asking(request_id, to))
        for index, outputs in told.items():
            self.output_queue.put_nowait((index, EngineCoreOutputs(outputs=outputs)))
        return len(chosen)

    def moved(self) -> tuple[int, int]:
        """Of the last :meth:`move_requests`: how many have left, and how many are undecided."""
        return self._departures.read(self.scheduler.requests)

    # Adapters, and sleep

    def set_adapters(self, wanted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._adapters.set(wanted)

    def fall_asleep(self, level: int) -> None:
        """Give memory back; raises ``ValueError`` if requests are open, or blocks are lent."""
        self._sleep.fall_asleep(level)
        self.meter.asleep = True

    def wake(self) -> None:
        self._sleep.wake()
        self.meter.asleep = False

    # Between steps

    def between_steps(self, work: Callable[[], None]) -> None:
        """Have EngineCore's thread do this before its next step, or at once if it is idle."""
        self.input_queue.put_nowait((_BETWEEN_STEPS, work))

    def stop(self) -> None:
        self.between_steps(sys.exit)

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        if request_type is _BETWEEN_STEPS:
            request()
        else:
            super()._handle_client_request(request_type, request)

    # Requests and steps, counted

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        # What raises here is answered to the request; in the scheduler it would end the engine.
        check_resumed(request, self.vllm_config.model_config)
        request.lora_request = self._adapters.own(request.lora_request)
        timed = by_own_clocks(request)
        made: tuple[Request, int] = super().preprocess_add_request(timed)
        return made

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        if self.meter.asleep:
            # It left its client before that could know; whoever put the engine to sleep sees it.
            self.wake()
        super().add_request(request, request_wave)
        self.meter.arrived(request, time.monotonic())
        self.loads.took(request.client_index)

    def abort_requests(self, request_ids: list[str]) -> None:
        super().abort_requests(request_ids)
        self.meter.left(request_ids)
        self._departures.left(request_ids)
        self._measure()

    def step(self) -> Any:
        return self._counted(super().step())

    def step_with_batch_queue(self) -> Any:
        return self._counted(super().step_with_batch_queue())

    def _counted(self, stepped: tuple[dict[int, EngineCoreOutputs] | None, bool]) -> Any:
        self.steps += 1
        if stepped[0]:
            self.meter.step(stepped[0], time.monotonic())
            self._measure()
        return stepped

    def _measure(self) -> None:
        scheduler = self.scheduler
        running, waiting = scheduler.get_request_counts()
        self.meter.waiting_tokens = tokens = self._waiting_tokens()
        usage = scheduler.get_kv_cache_usage()
        self.loads.measured(self.steps, running, waiting, usage, tokens)

    def _waiting_tokens(self) -> int:
        """Tokens without KV memory yet, of prompts computed in parts and of requests that wait."""
        scheduler = self.scheduler
        # Those whose prompts are computed came last.
        partly = takewhile(_has_prompt_left, reversed(scheduler.running))
        begun = chain(partly, scheduler.kv_holding_waiting)
        tokens: int = scheduler.waiting.tokens()
        tokens += sum(each.num_tokens - each.num_computed_tokens for each in begun)
        return tokens

    def facts(self) -> EngineFacts:
        config = self.vllm_config
        model, cache = config.model_config, config.cache_config
        return EngineFacts(
            pid=os.getpid(),
            max_model_len=model.max_model_len,
            max_running=config.scheduler_config.max_num_seqs,
            blocks=cache.num_gpu_blocks or 0,
            block_tokens=cache.block_size,
            layers=model.get_total_num_hidden_layers(),
            kv_heads=model.get_total_num_kv_heads(),
            item_bytes=model.dtype.itemsize,
            dropped_bytes=self._sleep.dropped_bytes,
            network=self._network.address,
        )


def _has_prompt_left(request: Request) -> bool:
    left: int = request.num_tokens - request.num_computed_tokens
    return left > 1

"""A simulated engine's process: its loop, and the sockets by which others speak to it.

All that others see of an engine but its frames is the real engine's: its output socket, its channel
to the replica, its measurement of load.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import Empty, Queue
from typing import Any

import msgspec
import zmq

from loomserve.platform.engine.core.addresses import DEAD
from loomserve.platform.engine.core.departures import MOVE_TO, Departures
from loomserve.platform.engine.core.engine_clients import NOBODY, EngineClients
from loomserve.platform.engine.core.messages import EngineFacts, EngineStart
from loomserve.platform.engine.core.metering import CoreMeter
from loomserve.platform.engine.core.network_sockets import NetworkSockets
from loomserve.platform.engine.core.output_sender import OutputSender, WakingQueue, bound_router
from loomserve.platform.models.simulated import KV_HEADS, LAYERS
from loomserve.platform.scheduling.policy.preemption import leaving
from loomserve.platform.simulated import wire
from loomserve.platform.simulated.engine import SimulatedEngine
from loomserve.platform.simulated.faults import Faults
from loomserve.platform.simulated.options import EngineOptions
from loomserve.platform.state.load_report import LoadBook

_logger = logging.getLogger(__name__)

# Where nothing that waits may start, it is looked again so often.
_STALLED_S = 0.01


class SimulatedCore:
    """A simulated engine as its replica and its :class:`OutputSender` see it."""

    def __init__(
        self,
        start: EngineStart,
        engine: Callable[[EngineOptions], SimulatedEngine] = SimulatedEngine,
    ) -> None:
        """Raises ``ValueError`` if there can be no such engine."""
        self._options = options = EngineOptions.of(start.options)
        given = options.simulated
        time.sleep(given.start_s)
        self.meter, self.loads = CoreMeter(), LoadBook()
        self._engine = engine(options)
        self._clients = EngineClients(start.silence_s)
        self._departures = Departures()
        self._network = NetworkSockets(start.host)
        self._inputs: Queue[Callable[[], None]] = Queue()
        self.output_queue: WakingQueue = WakingQueue()
        self._steps, self._computed_s = 0, 0.0
        self.faults = Faults(given.faults, f"{given.seed} {start.device}", self.between_steps)
        self.adapters: dict[int, Mapping[str, Any]] = {}
        self._ended = False
        self._bound = threading.Barrier(3)
        sender = OutputSender(self.output_queue, self._clients, self)
        also = partial(self._is_bound, "output")
        send = partial(sender.run, start.address.output, start.queued, also)
        self._sending = self._thread("outputs", send)
        self._thread("inputs", partial(self._receive, start.address.input))
        self._bound.wait()

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception:  # without it nobody can speak to this process
                _logger.exception("the thread of %s has ended", name)
                os._exit(1)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    # The loop

    def run(self) -> None:
        self.faults.begin()
        due = time.monotonic()
        while not self._ended:
            idle = self._engine.is_idle
            self._work(wait=idle)
            if idle:
                due = time.monotonic()
            if self._engine.is_idle:
                continue
            began = max(due, time.monotonic() - _STALLED_S)
            seconds = self._engine.begin(began)
            # One that is late by more than a little does not make up for it in a burst.
            due = began + (_STALLED_S if seconds is None else seconds * self.faults.slowness)
            time.sleep(max(0.0, due - time.monotonic()))
            if seconds is not None:
                self._computed_s += due - began
                self._end_step()
        self.output_queue.put(DEAD)
        self._sending.join()

    def _end_step(self) -> None:
        self._steps += 1
        now = time.monotonic()
        self._put_out(self._engine.end(now), now)

    def _put_out(self, outputs: dict[int, wire.Outputs], now: float) -> None:
        self.meter.step(outputs, now)
        self.meter.waiting_tokens = tokens = self._engine.waiting_tokens
        self.loads.measured(self._steps, *self._engine.load, tokens)
        for item in outputs.items():
            self.output_queue.put(item)

    def _work(self, *, wait: bool) -> None:
        """Do what has been asked for meanwhile; ``wait``: until there is something."""
        try:
            while not self._ended:
                self._inputs.get(block=wait)()
                wait = False
        except Empty:
            return

    # Clients

    def _is_bound(
        self, name: str, context: zmq.Context[Any], socket: zmq.Socket[bytes]
    ) -> AbstractContextManager[None]:
        self._bound.wait()
        return self._network.bound(name, context, socket)

    def _receive(self, address: str) -> None:
        with (
            zmq.Context() as context,
            bound_router(context, address) as socket,
            self._is_bound("input", context, socket),
        ):
            while True:
                identity, kind, *data = socket.recv_multipart()
                index = self._clients.index_of(identity)
                if index is None:
                    continue
                try:
                    self._take(index, kind, data)
                except Exception:
                    _logger.exception("an engine client sent what cannot be read")

    def _take(self, index: int, kind: bytes, data: Sequence[Any]) -> None:
        if kind == wire.ADD:
            work = partial(self._add, index, wire.request_of(data))
        elif kind == wire.ABORT:
            work = partial(self._abort, wire.value_of(data))
        elif kind == wire.UTILITY:
            _, call_id, method, args = wire.value_of(data)
            work = partial(self._answer, index, call_id, method, args)
        else:
            raise ValueError(f"clients do not send {kind!r}")
        self._inputs.put(work)

    def _add(self, index: int, request: wire.WireRequest) -> None:
        self.faults.count_request()
        if self.meter.asleep:
            self.wake()
        now = time.monotonic()
        try:
            one = self._engine.add(request, index, now)
        except ValueError as error:
            _logger.warning("request %s ends: %s", request.request_id, error)
            self.loads.refused(index)
            refused = wire.Output(request.request_id, [], finish_reason=wire.FinishReason.ERROR)
            self.output_queue.put((index, wire.Outputs(outputs=[refused])))
            return
        self.meter.arrived(one, now)
        self.loads.took(index)

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)
        self.meter.left(request_ids)
        self._departures.left(request_ids)
        # There may be no further step to tell who is left.
        stats = wire.Outputs(scheduler_stats=self._engine.stats())
        self._put_out({NOBODY: stats}, time.monotonic())

    def _answer(self, index: int, call_id: int, method: str, args: Sequence[Any]) -> None:
        try:
            answer = wire.UtilityAnswer(call_id, result=(None, called(self, method, args)))
        except Exception as error:
            why = f"Call to {method} method failed: {error}"
            answer = wire.UtilityAnswer(call_id, failure_message=why)
        self.output_queue.put((index, wire.Outputs(utility_output=answer)))

    def reset_prefix_cache(self, *_: Any) -> bool:
        self._engine.reset_prefix_cache()
        return True

    # What the sender asks for and tells

    def ready_response(self) -> bytes:
        return msgspec.msgpack.encode(ready_message(self._options))

    def beat(self) -> bytes:
        running, waiting, _ = self._engine.load
        return msgspec.msgpack.encode([self._steps, running, waiting, self._computed_s])

    def encode(self, outputs: wire.Outputs) -> Sequence[Any]:
        self.faults.send()
        return wire.frames_of(outputs)

    def gone(self, index: int) -> None:
        def end() -> None:
            requests = self._engine.requests.values()
            self._abort([each.request_id for each in requests if each.client == index])
            self.loads.gone(index)

        self.between_steps(end)

    def unwanted(self, outputs: wire.Outputs) -> None:
        left = [each.request_id for each in outputs.outputs if not each.finished]
        if left:
            self.between_steps(partial(self._abort, left))

    # What the replica asks for

    def between_steps(self, work: Callable[[], None]) -> None:
        self._inputs.put(work)

    def stop(self) -> None:
        self.between_steps(partial(setattr, self, "_ended", True))

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> Any:
        """It has no workers, which take nothing of a GPU."""
        if method == "taken_bytes":
            return [0]
        return [called(self, method, args)]

    def facts(self) -> EngineFacts:
        options = self._options
        return EngineFacts(
            pid=os.getpid(),
            max_model_len=options.max_model_len,
            max_running=options.limits.running,
            blocks=options.limits.blocks,
            block_tokens=options.limits.block_tokens,
            layers=LAYERS,
            kv_heads=KV_HEADS,
            item_bytes=options.item_bytes,
            dropped_bytes=0,
            network=self._network.address,
        )

    def move_requests(self, to: str, most: int) -> int:
        chosen = leaving(self._engine.staying(), most)
        self._departures.ask(chosen)
        for request_id in chosen:
            asked = wire.Output(request_id, [], kv_transfer_params={MOVE_TO: to})
            index = self._engine.requests[request_id].client
            self.output_queue.put((index, wire.Outputs(outputs=[asked])))
        return len(chosen)

    def moved(self) -> tuple[int, int]:
        return self._departures.read(self._engine.requests)

    def set_adapters(self, wanted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """It has whatever adapters are wanted: answers differ by their names alone."""
        self.adapters = {each["id"]: each for each in wanted}
        return {"problems": {}, "left": 0}

    def fall_asleep(self, level: int) -> None:
        if self._engine.requests:
            raise ValueError("it has requests")
        self._engine.reset_prefix_cache()
        self.meter.asleep = True

    def wake(self) -> None:
        self.meter.asleep = False


def called(core: SimulatedCore, method: str, args: Sequence[Any]) -> Any:
    """What vLLM's engine core does for its clients, and the faults that tests ask for. Raises
    NotImplementedError if a simulated engine does not do it."""
    if method == "collective_rpc":
        name, _, given = (*args, None, None)[:3]
        return core.collective_rpc(name, None, tuple(given or ()))
    calls: dict[str, Callable[..., Any]] = {
        "get_supported_tasks": lambda: ["generate"],
        "is_sleeping": lambda: core.meter.asleep,
        "sleep": lambda level=1, *_: core.fall_asleep(level),
        "wake_up": lambda *_: core.wake(),
        "list_loras": lambda: sorted(core.adapters),
        "reset_prefix_cache": core.reset_prefix_cache,
        "reset_mm_cache": lambda: None,
        "reset_encoder_cache": lambda: None,
        "hang": core.faults.hang,
        "slow_down": core.faults.slow_down,
        "slow_outputs": core.faults.slow_outputs,
        "die": core.faults.die,
    }
    if method not in calls:
        raise NotImplementedError(f"a simulated engine has no {method}")
    return calls[method](*args)


def ready_message(options: EngineOptions) -> dict[str, Any]:
    """vLLM's ``EngineCoreReadyResponse``."""
    limits = options.limits
    kv_tokens = limits.blocks * limits.block_tokens
    return {
        "max_model_len": options.max_model_len,
        "num_gpu_blocks": limits.blocks,
        "block_size": limits.block_tokens,
        "dp_stats_address": None,
        "dtype": "float32" if options.item_bytes > 2 else "bfloat16",
        "vllm_version": "simulated",
        "world_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": 0,
        "max_num_seqs": limits.running,
        "max_num_batched_tokens": limits.step_tokens,
        "instance_id": "",
        "supports_lora": True,
        "max_loras": 0,
        "kv_cache_size_tokens": kv_tokens,
        "kv_cache_max_concurrency": kv_tokens / options.max_model_len,
    }

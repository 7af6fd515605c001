"""An engine that speaks the wire and computes nothing: each step gives each request some tokens.

``python -m benchmarks.fake_engine INPUT OUTPUT PERIOD_S A_STEP TOKEN...`` answers until it is
killed, with ``A_STEP`` tokens a step.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from loomserve.platform.engine.core.addresses import BEAT, READY
from loomserve.platform.state.told_load import ToldLoad

FACTS = EngineCoreReadyResponse(
    max_model_len=2048, num_gpu_blocks=10_000, block_size=32, dp_stats_address=None,
    dtype="float32", vllm_version="", world_size=1, data_parallel_size=1, tensor_parallel_size=1,
    pipeline_parallel_size=1, decode_context_parallel_size=1, data_parallel_rank=0,
    max_num_seqs=1024, max_num_batched_tokens=2048, instance_id="", supports_lora=False,
    max_loras=0,
)  # fmt: skip


@dataclass
class _Answer:
    front_end: bytes
    tokens: int
    given: int = 0


class FakeEngine:
    """One process's engine, for any number of front ends."""

    def __init__(
        self, addresses: tuple[str, str], period_s: float, a_step: int, tokens: list[int]
    ) -> None:
        """``tokens`` are given in turn, ``a_step`` at once."""
        context: zmq.Context[Any] = zmq.Context.instance()
        self._input, self._output = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        for socket, address in zip((self._input, self._output), addresses, strict=True):
            socket.set(zmq.SNDHWM, 0)
            socket.bind(address)
        self._period_s, self._a_step = period_s, a_step
        self._tokens = tokens
        self._known: dict[bytes, bytes] = {}
        self._answers: dict[str, _Answer] = {}
        self._taken: Counter[bytes] = Counter()
        self._steps = 0
        self._requests, self._other = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder()
        self._encoder = MsgpackEncoder()

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._input, self._output):
            poller.register(socket, zmq.POLLIN)
        due = time.monotonic()
        while True:
            ready = dict(poller.poll(max(0, int(1000 * (due - time.monotonic())))))
            if self._output in ready:
                self._hear()
            if self._input in ready:
                self._take()
            if time.monotonic() >= due:
                self._step()
                # One that is late does not make up for it in a burst.
                due = max(due + self._period_s, time.monotonic())

    def _hear(self) -> None:
        identity, _, connection = self._output.recv_multipart()
        if self._known.get(identity) == connection:
            state = [self._steps, len(self._answers), 0]
            self._output.send_multipart([identity, BEAT, msgspec.msgpack.encode(state)])
        else:
            self._known[identity] = connection
            del self._taken[identity]
            self._output.send_multipart([identity, READY, msgspec.msgpack.encode(FACTS)])

    def _take(self) -> None:
        identity, kind, *data = self._input.recv_multipart()
        if kind == EngineCoreRequestType.ADD.value:
            request = self._requests.decode(data)
            most = request.sampling_params.max_tokens if request.sampling_params else None
            self._answers[request.request_id] = _Answer(identity, most or 1)
            self._taken[identity] += 1
        elif kind == EngineCoreRequestType.ABORT.value:
            for request_id in self._other.decode(data):
                self._answers.pop(request_id, None)
        else:
            _, call_id, method, _ = self._other.decode(data)
            said = ["generate"] if method == "get_supported_tasks" else None
            output = UtilityOutput(call_id, None, UtilityResult(said))
            self._send(identity, EngineCoreOutputs(utility_output=output))

    def _step(self) -> None:
        self._steps += 1
        outputs: dict[bytes, list[EngineCoreOutput]] = {}
        for request_id, answer in list(self._answers.items()):
            until = min(answer.given + self._a_step, answer.tokens)
            tokens = [self._tokens[n % len(self._tokens)] for n in range(answer.given, until)]
            answer.given = until
            ended = until == answer.tokens
            if ended:
                del self._answers[request_id]
            reason = FinishReason.LENGTH if ended else None
            outputs.setdefault(answer.front_end, []).append(
                EngineCoreOutput(request_id, tokens, finish_reason=reason)
            )
        now = time.monotonic()
        for identity, of_one in outputs.items():
            self._send(identity, EngineCoreOutputs(outputs=of_one, timestamp=now))

    def _send(self, to: bytes, outputs: EngineCoreOutputs) -> None:
        load = ToldLoad(self._steps, self._taken[to], len(self._answers), 0, 0.0)
        self._output.send_multipart([to, load.frame(), *self._encoder.encode(outputs)])


def main() -> None:
    inputs, outputs, period_s, a_step, *tokens = sys.argv[1:]
    engine = FakeEngine((inputs, outputs), float(period_s), int(a_step), list(map(int, tokens)))
    engine.run()


if __name__ == "__main__":
    main()

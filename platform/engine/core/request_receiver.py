"""The engine's input socket: what clients ask for, decoded beside the engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import zmq
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackDecoder

from loomserve.platform.engine.core.engine_clients import EngineClients

_logger = logging.getLogger(__name__)


class RequestReceiver:
    """Hands what known clients send to the engine's queues; a thread runs it for ever."""

    def __init__(self, core: Any, clients: EngineClients) -> None:
        """``core`` is an ``EngineCoreProc`` with ``loads``, a :class:`LoadBook`."""
        self._core, self._clients = core, clients
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._other = MsgpackDecoder()

    def run(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            identity, kind, *data = socket.recv_multipart(copy=False)
            index = self._clients.index_of(identity.bytes)
            if index is None:
                # It is told that it has to begin anew when it next says that it is there.
                continue
            try:
                self._take(index, EngineCoreRequestType(kind.bytes), data)
            except Exception:
                _logger.exception("an engine client sent what cannot be read")

    def _take(self, index: int, kind: EngineCoreRequestType, data: Sequence[Any]) -> None:
        given: Any
        match kind:
            case EngineCoreRequestType.ADD:
                given = self._added(index, self._requests.decode(data))
                if given is None:
                    return
            case EngineCoreRequestType.ABORT:
                given = self._other.decode(data)
                # As in vLLM: a step in flight ends them at once; the other queue keeps the order.
                self._core.aborts_queue.put_nowait(given)
            case EngineCoreRequestType.UTILITY:
                _, *call = self._other.decode(data)
                given = (index, *call)
            case _:
                raise ValueError(f"clients do not send {kind}")
        self._core.input_queue.put_nowait((kind, given))

    def _added(self, index: int, request: EngineCoreRequest) -> Any:
        """What the engine makes of a request; None if it has been answered."""
        request.client_index = index
        try:
            return self._core.preprocess_add_request(request)
        except MultiModalCacheMissError as error:
            self._core._handle_mm_cache_miss(request, error)
        except Exception:
            self._core._handle_request_preproc_error(request)
        self._core.loads.refused(index)
        return None

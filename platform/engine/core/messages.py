"""What a replica and its engine's process say to each other: plain data in msgpack frames.

The replica sends ``(call_id, method, args)``, and is answered ``(call_id, kind, value)``. ``kind``
is empty for what the method returned, else the name of an exception, whose message is ``value``.
The first call is ``start`` with an :class:`EngineStart`; its answer comes once the engine is ready.
"""

from __future__ import annotations

import struct
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.run.engine_address import EngineAddress, EngineNetwork

HEAD = struct.Struct("!I")
"""The length of a frame, in bytes, which stands before it."""

ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (ValueError, TypeError, RuntimeError, NotImplementedError, TimeoutError)
}
"""Exceptions that keep their type on the way; others become a ``RuntimeError``."""


class EngineStart(BaseModel):
    """How to make an engine."""

    model_config = ConfigDict(frozen=True)

    options: dict[str, Any] = Field(
        description="vLLM's AsyncEngineArgs, with `model` and `served_model_name`."
    )
    address: EngineAddress
    host: str | None = Field(
        None, description="Address at which clients on other nodes reach it; None: there are none."
    )
    simulated: bool = Field(default=False, description="Whether it is to compute nothing.")
    device: str = Field("", description="Its device, by which a simulated one has its faults.")
    own_process_workers: bool = Field(
        default=False, description="Whether even a single worker has a process of its own."
    )
    silence_s: float = Field(default=60.0, gt=0, description="A client silent so long is gone.")
    queued: int = Field(
        default=2000, gt=0, description="Messages that may wait for one client before it is."
    )


class EngineFacts(BaseModel):
    """What never changes of an engine."""

    model_config = ConfigDict(frozen=True)

    pid: int
    max_model_len: int
    max_running: int = Field(description="Requests in a batch.")
    blocks: int = Field(description="KV blocks; of a borrower those beyond its memory too.")
    block_tokens: int
    layers: int
    kv_heads: int
    item_bytes: int = Field(description="Bytes of a number of the model.")
    dropped_bytes: int = Field(0, description="Of weights, which it does without in sleep.")
    network: EngineNetwork | None = Field(None, description="Its sockets for other nodes, if any.")

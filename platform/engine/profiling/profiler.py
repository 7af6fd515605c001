"""Measures a profile: an engine's steps, and its KV's transfers to and from the host."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loomserve.kvstore.engine.transfers.batched_memory import memory_of
from loomserve.kvstore.engine.transfers.loader import Loader
from loomserve.kvstore.engine.transfers.memory import pinned, stream_for
from loomserve.kvstore.engine.transfers.saver import Saver
from loomserve.kvstore.engine.transfers.transfer import Load, Save
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.opening import start_server
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Done, Flush, Found, Lookup, Release, decode_slots
from loomserve.kvstore.storage.arena import Arena
from loomserve.kvstore.storage.checksum import BlockLayout
from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Device
from loomserve.platform.costs import transfer_time
from loomserve.platform.costs.profile import Profile, ProfileKey, Transfer, held_out, mape, noise
from loomserve.platform.costs.step_time import OnlineModel, StepTimes, TimedStep
from loomserve.platform.costs.transfer_time import TimedTransfer
from loomserve.platform.devices.binding import on_cores
from loomserve.platform.engine.profiling.profile_key import profile_key, weights_digest
from loomserve.platform.engine.profiling.step_timing import ProfiledEngine, Workload

Say = Callable[[str], None]

_SPACE = b"loomserve-profil"
_MOST_BLOCKS = 64
_MOST_BYTES = 2**28
_TRANSFERS = 200
_COMMIT_S = 10.0


@dataclass(frozen=True)
class Findings:
    """Profile, and the figures that it does not keep.

    ``corrected`` is the error on unseen steps of a predictor with a profile that observes the steps
    before, ``learnt`` that of one without a profile. Both are shares.
    """

    profile: Profile
    corrected: float
    learnt: float


def profile(
    name: str, model: str, device: Device, minutes: float, say: Say, **options: Any
) -> Findings:
    """Measure ``model``, a folder or a hub's id, for ``minutes``; ``options`` are vLLM's own.
    Raises StartError if vLLM cannot start the model, or cannot swap its kind of KV."""
    say(f"starting an engine of {name}")
    try:
        engine = ProfiledEngine(model, device, **options)
    except Exception as error:
        raise StartError(f"vLLM cannot start {name!r}: {error}") from error
    try:
        layout = _layout(engine)
        key, weights = profile_key(engine.config), weights_digest(engine.config)
        steps = _time_steps(engine, minutes, say)
    finally:
        engine.close()
    say("timing transfers of KV between the engine's memory and the host's")
    out, into = time_transfers(layout, device)
    return _findings(name, weights, key, steps, out, into)


def _time_steps(engine: ProfiledEngine, minutes: float, say: Say) -> list[TimedStep]:
    begin = time.monotonic()
    for steps in Workload(engine).run(begin + 60 * minutes):
        say(f"{steps} steps timed in {time.monotonic() - begin:.0f} s of {60 * minutes:.0f} s")
    return list(engine.timed)


def _findings(
    name: str,
    weights: str,
    key: ProfileKey,
    steps: list[TimedStep],
    out: list[TimedTransfer],
    into: list[TimedTransfer],
) -> Findings:
    known, unseen = held_out(steps)
    fitted = OnlineModel.of(known)
    result = Profile(
        model=name,
        weights=weights,
        engine=key,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        samples=tuple(
            (s.tokens, s.requests, s.context, s.attention, seconds) for s, seconds in steps
        ),
        mape=mape([fitted.seconds(step) for step, _ in unseen], unseen),
        noise=noise(steps),
        swap_out=_fit(out),
        swap_in=_fit(into),
    )
    return Findings(
        result,
        corrected=_replayed(StepTimes(fitted), steps, unseen),
        learnt=_replayed(StepTimes.unprofiled(), steps, unseen),
    )


def _replayed(times: StepTimes, steps: Sequence[TimedStep], scored: Sequence[TimedStep]) -> float:
    """Error on the ``scored`` steps of a predictor that observes all steps, one by one."""
    counted = {step for step, _ in scored}
    predicted = []
    for step, seconds in steps:
        if step in counted:
            predicted.append(times.seconds(step))
        times.observe(step, seconds)
    return mape(predicted, [one for one in steps if one[0] in counted])


def _fit(transfers: Sequence[TimedTransfer]) -> Transfer:
    """Fit every second transfer, and measure the error on the others."""
    bytes_per_s, latency_s = transfer_time.fit(transfers[::2])
    unseen = np.array(transfers[1::2])
    predicted = latency_s + unseen[:, 0] / bytes_per_s
    error = float(np.mean(np.abs(predicted - unseen[:, 1]) / unseen[:, 1]))
    return Transfer(
        bytes_per_s=bytes_per_s, latency_s=latency_s, mape=error, noise=noise(transfers)
    )


def _layout(engine: ProfiledEngine) -> BlockLayout:
    groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise StartError("the model has several kinds of layers, whose KV is not swapped")
    layers = len(groups[0].layer_names)
    return BlockLayout(layers, groups[0].kv_cache_spec.page_size_bytes)


def time_transfers(
    layout: BlockLayout, device: Device
) -> tuple[list[TimedTransfer], list[TimedTransfer]]:
    """Time saves from a KV cache of this layout into a store's arena, and loads, of random size.
    They use what the platform's engines use, checksums included, from a thread on the device."""
    blocks = max(1, min(_MOST_BLOCKS, _MOST_BYTES // layout.block_bytes))
    random = np.random.default_rng(0)
    out: list[TimedTransfer] = []
    into: list[TimedTransfer] = []
    with _running_store(6 * blocks * layout.slot_bytes) as store_options, on_cores(device):
        worker = _Worker(store_options, layout, blocks, device)
        for number in range(-4, _TRANSFERS):
            # The first transfers map the arena's memory, which an engine does once.
            size = blocks if number < 0 else int(np.exp(random.uniform(0, np.log(blocks + 1))))
            # An engine's blocks are scattered once it has served for a while.
            where = random.permutation(blocks)[:size].tolist()
            keys = random.bytes(KEY_BYTES * size)
            times = worker.swap_out(keys, where), worker.swap_in(keys, where)
            if number >= 0:
                worker.forget()
                out.append((size * layout.block_bytes, times[0]))
                into.append((size * layout.block_bytes, times[1]))
        worker.close()
    return out, into


@contextmanager
def _running_store(memory: int) -> Iterator[StoreOptions]:
    with tempfile.TemporaryDirectory() as folder:
        store_options = StoreOptions(
            folder=Path(folder),
            arena=Path(f"/dev/shm/loomserve-profile-{os.getpid()}"),
            memory=memory,
        )
        server, _ = start_server(store_options)
        try:
            yield store_options
        finally:
            server.stop()
            store_options.arena.unlink(missing_ok=True)


class _Worker:
    """Worker of an engine with a KV cache but without a model."""

    def __init__(
        self, store_options: StoreOptions, layout: BlockLayout, blocks: int, device: Device
    ) -> None:
        place = torch.device(device.kind)
        shape = (layout.layers, blocks, layout.layer_bytes)
        cache = torch.randint(0, 255, shape, dtype=torch.uint8, device=place)
        memory = memory_of({str(layer): cache[layer] for layer in range(layout.layers)})
        arena = Arena.attach(store_options.arena)
        self._closing = ExitStack()
        self._closing.enter_context(pinned(place, arena.base_address, arena.nbytes))
        clients = [StoreClient(store_options.address) for _ in range(2)]
        self._loader = Loader(memory, arena, stream_for(place), clients[0])
        self._saver = Saver(memory, arena, stream_for(place), clients[1], "profile")
        self._client = StoreClient(store_options.address, timeout_ms=10_000)
        self._layers = range(layout.layers)

    def swap_out(self, keys: bytes, blocks: list[int]) -> float:
        """Save the blocks; seconds until the engine could give them to another request."""
        begin = time.perf_counter()
        self._saver.start([Save(_SPACE, keys, blocks, 1.0)])
        for layer in self._layers:
            self._saver.layer_done(layer)
        self._saver.finish(sound=True)
        return time.perf_counter() - begin

    def swap_in(self, keys: bytes, blocks: list[int]) -> float:
        found = self._find(keys, len(blocks))
        begin = time.perf_counter()
        slots = decode_slots(found.slots)
        self._loader.start([Load(_SPACE, keys, 0, slots, blocks, found.lease)])
        wrong = self._loader.finish()
        seconds = time.perf_counter() - begin
        if wrong:
            raise RuntimeError(f"{len(wrong)} blocks came back wrong")
        return seconds

    def forget(self) -> None:
        self._client.ask(Flush(""), Done)

    def close(self) -> None:
        for part in (self._loader, self._saver, self._client):
            part.close()
        self._closing.close()

    def _find(self, keys: bytes, blocks: int) -> Found:
        """Look the blocks up, until the save is committed: a moment after it is finished."""
        until = time.monotonic() + _COMMIT_S
        while True:
            found = self._client.ask(Lookup(_SPACE, keys, 0, 60.0, promote=True), Found)
            if found.in_memory == blocks:
                return found
            self._client.ask(Release([found.lease]), Done)
            if time.monotonic() > until:
                raise RuntimeError(f"{found.in_memory} of {blocks} blocks were saved")
            time.sleep(0.001)

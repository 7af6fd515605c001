"""A step's copies around a forward pass that calls for each layer, and around one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from loomserve.kvstore.engine import connector_worker
from loomserve.kvstore.engine.connector import StoreConnector
from loomserve.kvstore.engine.connector_worker import StoreConnectorWorker
from loomserve.kvstore.engine.messages import StepTransfers
from loomserve.kvstore.engine.transfers.batched_memory import BatchedMemory
from tests.unit.kvstore.engine.transfers.test_batched_memory import ByCpu
from tests.unit.kvstore.engine.transfers.test_transfer import (
    LAYERS,
    Store,
    chain,
    random_caches,
    save_of,
    saved,
)

NAMES = [f"layer {number}" for number in range(LAYERS)]


class Worker(StoreConnectorWorker):
    """The connector's half of a worker, and the caches of its model."""

    def __init__(self, store: Store, number: int) -> None:
        options = {"address": store.address, "arena": store.folder / "arena", "model": "model"}
        super().__init__(options, rank=0)
        self.caches = random_caches(number)
        self.register({name: self.caches[layer] for layer, name in enumerate(NAMES)})

    def settled(self, store: Store) -> None:
        saved(self._saver, store)

    def compute(self, values: torch.Tensor, saves: Sequence[Any], layers: int = LAYERS) -> None:
        """A forward pass with calls around each layer."""
        for layer, name in enumerate(NAMES[:layers]):
            self.before_layer(name, list(saves))
            self.caches[layer] = values[layer]
            self.after_layer(name)


@pytest.fixture(name="workers", params=["cpu", "gpu"])
def _workers(
    store: Store, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Worker, Worker]]:
    if request.param == "gpu":
        # Copied by addresses, and staged.
        by_cpu = partial(BatchedMemory, copy=ByCpu())
        monkeypatch.setattr(connector_worker, "memory_of", by_cpu)
    with closing(Worker(store, 1)) as one, closing(Worker(store, 2)) as other:
        yield one, other


SAVES = [{0: save_of("a", [7, 2, 9])}]
VALUES = random_caches(3)


def graph(worker: Worker) -> None:
    """A step that computes all layers in one graph."""
    worker.caches[:] = VALUES


def step(worker: Worker, compute: Callable[[], None], *, one_graph: bool) -> None:
    worker.start_loads(StepTransfers(), one_graph=one_graph)
    compute()
    worker.end_step(SAVES, sound=True)


def loaded(store: Store, worker: Worker) -> bool:
    """Whether blocks 1, 3 and 5 have, when the forward pass may begin, what was saved."""
    load = store.load(chain("a", 3), [1, 3, 5])
    worker.start_loads(StepTransfers(loads=[{0: load}]), one_graph=True)
    whole = torch.equal(worker.caches[:, [1, 3, 5]], VALUES[:, [7, 2, 9]])
    worker.end_step([], sound=True)
    assert not worker.take_failed()
    return whole


def test_a_graph_waits_for_all_layers_and_what_it_computed_is_saved(
    store: Store, workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = workers
    step(one, lambda: graph(one), one_graph=True)
    one.settled(store)
    memory = type(other.memory)
    copy = memory.from_host

    def slow(*args: Any) -> None:
        time.sleep(0.02)
        copy(*args)

    monkeypatch.setattr(memory, "from_host", slow)
    assert loaded(store, other)


def test_graphs_and_passes_that_call_for_each_layer_take_turns(
    store: Store, workers: tuple[Worker, Worker]
) -> None:
    one, _ = workers
    for number, one_graph in enumerate([True, False, True]):
        saves = [{0: save_of(f"{number}", [4, 5])}]
        one.start_loads(StepTransfers(), one_graph=one_graph)
        if one_graph:
            graph(one)
        else:
            one.compute(VALUES, saves)
        one.end_step(saves, sound=True)
        one.settled(store)
        assert store.found(chain(f"{number}", 2)) == 2


def test_a_pass_that_called_for_no_layer_and_was_no_graph_leaves_nothing(
    store: Store, workers: tuple[Worker, Worker]
) -> None:
    one, _ = workers
    step(one, lambda: graph(one), one_graph=True)
    one.settled(store)
    other = [{0: save_of("b", [1, 2])}]
    one.start_loads(StepTransfers(), one_graph=False)
    one.end_step(other, sound=True)
    one.start_loads(StepTransfers(), one_graph=False)
    one.compute(VALUES, other, LAYERS - 1)
    one.end_step(other, sound=True)
    one.settled(store)
    assert store.found(chain("b", 2)) == 0


@pytest.mark.parametrize("raises", [False, True])
def test_a_graph_that_raises_leaves_nothing(
    store: Store, workers: tuple[Worker, Worker], raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = workers
    connector = StoreConnector.__new__(StoreConnector)
    connector._scheduler, connector._worker = None, one
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.FULL)
    monkeypatch.setattr(mixin, "get_forward_context", lambda: context)
    scheduled: Any = SimpleNamespace(
        kv_connector_metadata=StepTransfers(saves=SAVES),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )

    def of_vllm() -> None:
        with mixin.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled):
            graph(one)
            if raises:
                raise RuntimeError("of the device")

    if raises:
        with pytest.raises(RuntimeError, match="of the device"):
            of_vllm()
    else:
        of_vllm()
    one.settled(store)
    assert store.found(chain("a", 3)) == (0 if raises else 3)


@pytest.mark.parametrize(("copies", "calls"), [({}, []), ({"saves": SAVES}, ["before", "after"])])
def test_only_a_step_that_loads_or_saves_has_calls_around_its_layers(
    copies: dict[str, Any], calls: list[str]
) -> None:
    connector, called = StoreConnector.__new__(StoreConnector), list[str]()
    connector._scheduler, connector._worker = (
        None,
        SimpleNamespace(
            before_layer=lambda *_: called.append("before"),
            after_layer=lambda _: called.append("after"),
        ),
    )
    connector.bind_connector_metadata(StepTransfers(**copies))
    assert connector.has_connector_metadata() == bool(calls)
    connector.wait_for_layer_load(NAMES[0])
    connector.save_kv_layer(NAMES[0], torch.empty(0), None)
    assert called == calls
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()

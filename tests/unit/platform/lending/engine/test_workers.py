"""The workers' ends of loans, between a borrower and a lender in one process, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import _custom_ops  # noqa: F401  (the kernels that the server looks for)

from loomserve.kvstore.engine.transfers.memory import BlockMemory, KvMemory
from loomserve.platform.lending.engine.attention import LendingContext
from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.borrower_worker import BorrowerWorker, StepLimits
from loomserve.platform.lending.engine.lender_worker import LenderWorker
from loomserve.platform.lending.engine.memory.mapped import MappedMemory
from loomserve.platform.lending.engine.scheduler import make_scheduler
from loomserve.platform.lending.engine.shard_worker import ShardWorker
from loomserve.platform.lending.engine.shards.shard import LocalKv
from loomserve.platform.lending.engine.shards.store_memory import ShardedMemory
from loomserve.platform.lending.leaf import ring_leaf
from loomserve.platform.lending.ring.attention_server import AttentionServer
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing

OWN_BLOCKS, LENT_BLOCKS, LENDER = 4, 6, 1
GEOMETRY = Geometry(2, 4, 2, 32, 32, "float32", 1.0, "vec")
LIMITS = StepLimits(max_tokens=64, max_requests=2, max_blocks=8)


def local_kv(blocks: int, numbers: int, geometry: Geometry = GEOMETRY) -> LocalKv:
    shape = (geometry.layers, numbers, geometry.kv_heads, geometry.block_size)
    like = torch.empty((*shape, 2 * geometry.head_size), device="meta")
    memory = MappedMemory(like.nbytes, torch.device("cpu"))
    every = memory.tensor(like).normal_()
    attention = [SimpleNamespace(layer_name=f"layers.{at}", kv_cache=None) for at in range(2)]
    return LocalKv(attention, [each[:blocks] for each in every], memory, numbers, geometry)


@dataclass
class StoreSeen:
    """Stands for the engine's end of the KV store."""

    memory: BlockMemory
    settled: int = 0
    used: list[BlockMemory] = field(default_factory=list)

    def settle(self) -> None:
        self.settled += 1

    def use(self, memory: BlockMemory) -> None:
        self.used.append(memory)


class Engines:
    """A borrower with one partition besides its own, and a lender."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        numbers = OWN_BLOCKS + LENT_BLOCKS
        self.kv = local_kv(OWN_BLOCKS, numbers)
        self.context = LendingContext(5.0, Partitions([0, OWN_BLOCKS], numbers))
        leaf = ring_leaf(split_kv=True)
        self.borrower = BorrowerWorker(self.context, self.kv, LIMITS, leaf)
        names = [each.layer_name for each in self.kv.attention]
        self.store = StoreSeen(KvMemory(dict(zip(names, self.kv.caches, strict=True))))
        model: Any = None
        self.shards = ShardWorker(self.context, self.kv, model, LIMITS, leaf, lambda: self.store)
        self.lender_context = LendingContext()
        self.server = AttentionServer()
        lender_kv = local_kv(LENT_BLOCKS, LENT_BLOCKS)
        self.lender = LenderWorker(self.lender_context, self.server, lender_kv, nn.Module())
        self.lender.look_for_tasks("operators")

    def lend(self, asked: dict[str, Any]) -> None:
        self.lender.lend(self.path, 0, LENT_BLOCKS, asked)
        ring = LentRing.attach(Path(self.path))
        ring.granted = LENT_BLOCKS
        ring.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    both = Engines(tmp_path / "ring")
    yield both
    both.server.stop()


def test_a_lender_looks_for_tasks_while_it_lends_and_only_then(engines: Engines) -> None:
    assert engines.lender_context.poll is None
    engines.lend(engines.borrower.requirements())
    assert engines.lender_context.poll is not None
    assert engines.lender_context.poll() == 0
    engines.lender.end_lending(engines.path)
    assert engines.lender_context.poll is None
    assert not Path(engines.path).exists()


def test_a_lender_polls_between_steps_only_if_told_so(engines: Engines) -> None:
    engines.lend(engines.borrower.requirements())
    assert engines.lender.look_for_tasks("steps") == {}
    assert engines.lender_context.poll is None


def test_kv_of_another_type_is_not_taken_in(engines: Engines) -> None:
    asked = engines.borrower.requirements()
    asked["geometry"] = asked["geometry"].replace("float32", "bfloat16")
    with pytest.raises(ValueError, match="no room for a borrower's of bfloat16"):
        engines.lend(asked)


def test_blocks_move_to_the_lender_and_back(engines: Engines) -> None:
    asked = engines.borrower.requirements()
    assert (asked["blocks"], asked["least"]) == (LENT_BLOCKS, 1)
    engines.lend(asked)
    engines.borrower.borrow(LENDER, engines.path)
    assert engines.borrower.move_blocks(OWN, LENDER, [(0, OWN_BLOCKS), (1, OWN_BLOCKS + 2)])
    assert engines.borrower.move_blocks(LENDER, OWN, [(OWN_BLOCKS, 3), (OWN_BLOCKS + 2, 2)])
    for cache in engines.kv.caches:
        assert torch.equal(cache[3], cache[0])
        assert torch.equal(cache[2], cache[1])
    engines.borrower.end_loan(LENDER)
    assert engines.context.borrowers == {}


def test_heads_are_handed_over_and_taken_back(engines: Engines) -> None:
    before = [cache.clone() for cache in engines.kv.caches]
    asked = engines.shards.requirements({"heads": 1})
    assert (asked["blocks"], asked["least"]) == (2 * OWN_BLOCKS, OWN_BLOCKS)
    asked["blocks"] = LENT_BLOCKS
    engines.lend(asked)
    assert engines.shards.begin(LENDER, engines.path, {"heads": 1}) == 2 * OWN_BLOCKS
    assert engines.shards.send(LENDER, [0, 1])
    assert engines.context.shard is None
    assert engines.shards.hand_over(LENDER, [2])
    assert engines.context.shard is not None
    assert engines.context.partitions.of(OWN_BLOCKS) == OWN
    assert [engines.shards.free_memory(LENDER) for _ in range(2)] == [False, True]
    assert isinstance(engines.store.used[-1], ShardedMemory)
    assert engines.shards.copy(LENDER, [(2, 3)])
    assert [engines.shards.prepare_return(LENDER) for _ in range(2)] == [False, True]
    assert engines.shards.fetch(LENDER, [0, 1])
    assert engines.shards.take_back(LENDER, [2, 3])
    assert engines.context.shard is None
    assert engines.context.partitions.of(OWN_BLOCKS) == LENDER
    for now, then in zip(engines.kv.caches, before, strict=True):
        assert torch.equal(now[:3], then[:3])
        assert torch.equal(now[3], then[2])
    assert isinstance(engines.store.used[-1], KvMemory)
    assert engines.store.settled == 1
    assert engines.shards.end_loan(LENDER)
    assert not engines.shards.end_loan(LENDER)


def test_a_shard_stays_here_if_its_lender_has_gone(engines: Engines) -> None:
    engines.lend(engines.shards.requirements({"heads": 1}))
    engines.context.patience_s = 0.01
    engines.shards.begin(LENDER, engines.path, {"heads": 1})
    engines.lender.end_lending(engines.path)
    assert not engines.shards.hand_over(LENDER, [0])
    assert engines.context.shard is None
    assert engines.store.used == []


def test_an_engine_whose_worker_takes_no_part_in_lending_does_not_start() -> None:
    of: Any = SimpleNamespace(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")
    with pytest.raises(ValueError, match="CPUWorker neither lends nor borrows: derive it from"):
        make_scheduler(SimpleNamespace(parallel_config=of))  # type: ignore[arg-type]

"""The KV store behind steps that are one graph each, as on GPUs: all comes back, same tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine import BLOCK_TOKENS
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import HANDED_OVER, HANDS_OVER
from tests.integration.conftest import StoredEngine, exact_engine, with_store
from tests.integration.test_kv_connector import blocks_in_memory, prompt
from tests.waiting import within

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", name="graphs")
def _graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    folder = tmp_path_factory.mktemp("graphs")
    arena = Path(f"/dev/shm/loomserve-kv-graphs-{os.getpid()}")
    options = StoreOptions(folder=folder, arena=arena, memory=128 * 2**20)
    connector = options.kv_transfer_config("demo")
    connector["kv_connector"] = "OneGraphConnector"
    connector["kv_connector_module_path"] = "tests.integration.one_graph_connector"
    with with_store(StoredEngine(None, options)) as engine:
        engine.llm = exact_engine(folder, connector)
        yield engine


@pytest.mark.parametrize("tokens", [193, 200, 300])
def test_a_prefix_comes_back_with_the_same_tokens(graphs: StoredEngine, tokens: int) -> None:
    text = prompt(tokens, tokens)
    first = graphs.answer([text], tokens=40)[0]
    whole = (tokens + 39) // BLOCK_TOKENS
    within(5, lambda: blocks_in_memory(graphs) >= whole)
    graphs.forget()
    loaded = graphs.answer([text], tokens=40)[0]
    assert loaded.cached == tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert loaded.tokens == first.tokens
    graphs.forget()
    # The answer's blocks, too, were filled by steps of a token each.
    again = graphs.answer([text + first.tokens])[0]
    assert again.cached == whole * BLOCK_TOKENS
    graphs.flush_store()
    graphs.forget()


def test_another_engine_goes_on_after_a_prompt_without_computing_any_of_it(
    graphs: StoredEngine,
) -> None:
    text = prompt(8, 200)
    whole = graphs.answer([text], tokens=12)[0].tokens
    graphs.flush_store()
    graphs.forget()
    (first,) = graphs.answer([text], tokens=1, kv_transfer={HANDS_OVER: True})[0].tokens
    graphs.forget()
    rest = graphs.answer([[*text, first]], tokens=11, kv_transfer={HANDED_OVER: 200})[0]
    assert (rest.cached, [first, *rest.tokens]) == (200, whole)

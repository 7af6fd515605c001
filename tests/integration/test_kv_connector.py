"""The KV store behind a real vLLM: tokens are the same whoever computed the KV, whatever breaks."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from benchmarks.engine import BLOCK_TOKENS
from loomserve.kvstore.server.protocol import HANDED_OVER, HANDS_OVER
from loomserve.kvstore.storage.arena import Arena
from tests.integration.conftest import StoredEngine
from tests.waiting import PATIENCE_S, within

pytestmark = pytest.mark.timeout(300)


def prompt(seed: int, tokens: int) -> list[int]:
    """Sequences that differ from the first token on, of the vocabulary's plain words."""
    source = random.Random(seed)
    return [source.randrange(1000, 40000) for _ in range(tokens)]


@pytest.fixture(name="engine")
def _engine(stored_engine: StoredEngine) -> StoredEngine:
    if stored_engine.server is None:
        stored_engine.start_store()
    stored_engine.forget()
    stored_engine.flush_store()
    return stored_engine


def blocks_in_memory(engine: StoredEngine) -> int:
    return sum(model.blocks_in_memory for model in engine.usage().models)


def of_another_process(engine: StoredEngine) -> None:
    """As if all blocks had been written by a process whose bytes nobody has checked."""
    assert engine.server is not None
    arena = engine.server._store.memory.arena
    for slot, header in list(arena.headers()):
        arena.publish(slot, header)


def test_a_prefix_comes_back_from_memory_with_the_same_tokens(engine: StoredEngine) -> None:
    text = prompt(1, 200)
    first = engine.answer([text])[0]
    assert first.cached == 0
    within(5, lambda: blocks_in_memory(engine) == 200 // BLOCK_TOKENS)
    # The engine's own prefix cache splits the work as a load from the store does.
    own = engine.answer([text])[0]
    engine.forget()
    loaded = engine.answer([text])[0]
    assert own.cached == loaded.cached == 192
    assert loaded.tokens == own.tokens == first.tokens


def test_a_shorter_and_a_longer_prompt_share_what_they_have_in_common(
    engine: StoredEngine,
) -> None:
    text = prompt(2, 300)
    whole = engine.answer([text])[0]
    engine.answer([text[:100] + prompt(3, 60)])
    engine.forget()
    assert engine.answer([text[:100]])[0].cached == 96
    engine.forget()
    again = engine.answer([text])[0]
    assert (again.cached, again.tokens) == (288, whole.tokens)


def test_generated_tokens_are_reused_by_the_next_turn(engine: StoredEngine) -> None:
    text = prompt(4, 90)
    answer = engine.answer([text], tokens=40)[0]
    turn = text + answer.tokens + prompt(5, 20)
    engine.forget()
    fresh = engine.answer([turn])[0]
    assert fresh.cached == 128
    engine.flush_store()
    engine.forget()
    assert engine.answer([turn])[0].tokens == fresh.tokens


def test_prompts_in_one_batch_and_in_chunks_load_and_save_side_by_side(
    engine: StoredEngine,
) -> None:
    # Longer together than a step's 256 tokens, so that prefills come in chunks.
    texts = [prompt(10 + i, 200 + 40 * i) for i in range(3)]
    alone = [engine.answer([text])[0].tokens for text in texts]
    engine.forget()
    together = engine.answer(texts)
    assert [answer.cached for answer in together] == [192, 224, 256]
    assert [answer.tokens for answer in together] == alone


@pytest.mark.claim("kv from SSD")
def test_what_left_memory_comes_back_from_ssd(engine: StoredEngine) -> None:
    texts = [prompt(20 + i, 200) for i in range(12)]
    first = [engine.answer([text])[0].tokens for text in texts]
    within(10, lambda: engine.usage().ssd_used_bytes > 0)
    usage = engine.usage()
    assert usage.models[0].evicted_blocks > 0
    assert usage.used_bytes <= usage.capacity_bytes
    engine.forget()
    again = [engine.answer([text])[0] for text in texts]
    assert [answer.tokens for answer in again] == first
    # More prefixes than memory can hold were found.
    assert sum(answer.cached for answer in again) > 40 * BLOCK_TOKENS


def test_a_damaged_block_is_computed_again_and_forgotten(engine: StoredEngine) -> None:
    text = prompt(40, 200)
    first = engine.answer([text])[0]
    within(5, lambda: blocks_in_memory(engine) == 6)
    before = engine.usage().corrupt_blocks
    arena = Arena.attach(engine.options.arena)
    # Every byte of the first extents but their headers, in the middle of layers too.
    everything = arena.view(0, arena.capacity_bytes)
    everything[2**16 :: 4096] ^= np.uint8(255)
    of_another_process(engine)
    engine.forget()
    again = engine.answer([text])[0]
    assert again.tokens == first.tokens
    within(5, lambda: engine.usage().corrupt_blocks > before)
    everything[2**16 :: 4096] ^= np.uint8(255)
    engine.forget()
    assert engine.answer([text])[0].tokens == first.tokens


def test_without_a_store_the_engine_computes_and_finds_all_again_later(
    engine: StoredEngine,
) -> None:
    text = prompt(50, 200)
    first = engine.answer([text])[0]
    within(5, lambda: blocks_in_memory(engine) == 6)
    engine.stop_store()
    engine.forget()
    begin = time.monotonic()
    away = engine.answer([text])[0]
    assert (away.cached, away.tokens) == (0, first.tokens)
    assert time.monotonic() - begin < PATIENCE_S
    engine.start_store()
    # The engine asks a store that was away again after a second.
    time.sleep(1.1)
    engine.forget()
    back = engine.answer([text])[0]
    assert (back.cached, back.tokens) == (192, first.tokens)


@pytest.mark.slow
def test_preempted_requests_get_the_same_tokens(engine: StoredEngine) -> None:
    # Four sequences that grow beyond the engine's own memory of 65 blocks.
    texts = [prompt(60 + i, 430) for i in range(4)]
    alone = []
    for text in texts:
        alone.append(engine.answer([text], tokens=100)[0].tokens)
        engine.forget()
    engine.flush_store()
    together = engine.answer(texts, tokens=100)
    assert [answer.tokens for answer in together] == alone


@pytest.mark.parametrize("tokens", [200, 192, 193, 33, 20])
def test_another_engine_goes_on_after_a_prompt_without_computing_any_of_it(
    engine: StoredEngine, tokens: int
) -> None:
    text = prompt(80 + tokens, tokens)
    whole = engine.answer([text], tokens=12)[0].tokens
    engine.flush_store()
    engine.forget()
    (first,) = engine.answer([text], tokens=1, kv_transfer={HANDS_OVER: True})[0].tokens
    assert first == whole[0]
    engine.forget()
    handed_over = {HANDED_OVER: tokens}
    rest = engine.answer([[*text, first]], tokens=11, kv_transfer=handed_over)[0]
    assert rest.tokens == whole[1:]
    # A prompt of less than a block is not worth it.
    assert rest.cached == (tokens if tokens > BLOCK_TOKENS else 0)
    # Who went on has left the end of its answer in the place of the prompt's.
    engine.answer([text], tokens=1, kv_transfer={HANDS_OVER: True})
    engine.forget()
    # Where it draws the first token itself, it computes the prompt's last.
    again = engine.answer([text], tokens=12, kv_transfer=handed_over)[0]
    assert again.tokens == whole
    assert again.cached == (tokens - 1 if tokens > BLOCK_TOKENS else 0)


def test_what_was_announced_and_does_not_come_is_computed(engine: StoredEngine) -> None:
    text = prompt(90, 200)
    whole = engine.answer([text])[0].tokens
    engine.flush_store()
    engine.forget()
    begin = time.monotonic()
    late = engine.answer([text], kv_transfer={HANDED_OVER: 200})[0]
    assert (late.cached, late.tokens) == (0, whole)
    assert time.monotonic() - begin < PATIENCE_S


def test_a_damaged_tail_is_computed_again(engine: StoredEngine) -> None:
    text = prompt(91, 200)
    whole = engine.answer([text], tokens=8)[0].tokens
    # What an earlier test handed over is kept for a while, whatever is flushed.
    within(15, lambda: engine.usage().leases == 0)
    engine.flush_store()
    engine.forget()
    (first,) = engine.answer([text], tokens=1, kv_transfer={HANDS_OVER: True})[0].tokens
    within(5, lambda: blocks_in_memory(engine) == 7)
    everything = Arena.attach(engine.options.arena)
    damaged = everything.view(0, everything.capacity_bytes)
    damaged[2**16 :: 4096] ^= np.uint8(255)
    of_another_process(engine)
    engine.forget()
    rest = engine.answer([[*text, first]], tokens=7, kv_transfer={HANDED_OVER: 200})[0]
    damaged[2**16 :: 4096] ^= np.uint8(255)
    assert rest.tokens == whole[1:]


def test_a_salt_keeps_tenants_apart(engine: StoredEngine) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    text = prompt(70, 200)
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def cached(salt: str) -> int:
        engine.forget()
        (output,) = engine.llm.generate(
            [TokensPrompt(prompt_token_ids=text, cache_salt=salt)], greedy, use_tqdm=False
        )
        return int(output.num_cached_tokens)

    assert cached("one") == 0
    assert cached("one") == 192
    assert cached("other") == 0

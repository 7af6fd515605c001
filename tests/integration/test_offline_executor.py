"""Static batches on a small random model: the same answers as alone, and out of memory for real."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from loomserve.platform.batch.offline.executor import (
    OfflineExecutor,
    OfflineRequest,
    OutOfMemoryError,
)
from loomserve.routers.static_batching.base import BatchRequest, KvBudget
from loomserve.routers.static_batching.queue import BatchQueue, oldest
from loomserve.routers.static_batching.s3 import S3
from tests.integration import tiny_llama

CONTEXT = 64
AMPLE = 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.save(folder, vocabulary=40_000, context=CONTEXT)
    return folder


def executor(model: Path, kv_bytes: int = AMPLE) -> OfflineExecutor:
    return OfflineExecutor(model, threads=1, kv_bytes=kv_bytes)


def prompts(*lengths: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(128) for _ in range(length)] for length in lengths]


def test_answers_are_those_of_each_request_alone(model: Path) -> None:
    alone = AutoModelForCausalLM.from_pretrained(model)
    given = prompts(3, 17, 9, 1)
    limits = [12, 5, 20, 1]
    expected = [
        alone.generate(
            torch.tensor([prompt]), max_new_tokens=limit, do_sample=False, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt, limit in zip(given, limits, strict=True)
    ]
    requests = [OfflineRequest(*one) for one in zip(given, limits, strict=True)]
    assert executor(model).run(requests) == expected
    assert len({tuple(answer) for answer in expected}) == len(expected)


def test_an_answer_ends_at_its_end_token_and_the_batch_with_its_longest(model: Path) -> None:
    engine = executor(model)
    [prompt] = prompts(8)
    [answer] = engine.run([OfflineRequest(prompt, 12)])
    end = answer[4]
    engine.end_tokens = frozenset({end})
    cut, whole = engine.run(
        [OfflineRequest(prompt, 12), OfflineRequest(prompt, 12, ignore_eos=True)]
    )
    assert cut == answer[: answer.index(end) + 1]
    assert whole == answer


def test_a_token_takes_the_memory_that_its_keys_and_values_take(model: Path) -> None:
    assert executor(model).token_bytes == 2 * 2 * 2 * 8 * 4


def test_memory_is_crossed_by_the_batchs_padded_tokens_and_not_before(model: Path) -> None:
    engine = executor(model)
    requests = [OfflineRequest(prompt, 6) for prompt in prompts(10, 4)]
    engine.kv_bytes = 2 * (10 + 6) * engine.token_bytes
    assert [len(answer) for answer in engine.run(requests)] == [6, 6]
    engine.kv_bytes -= 1
    with pytest.raises(OutOfMemoryError, match="two halves") as crossed:
        engine.run(requests)
    assert crossed.value.generated == 5


def test_what_cannot_be_computed_is_refused(model: Path) -> None:
    engine = executor(model)
    assert engine.run([]) == []
    for wrong in (OfflineRequest([], 1), OfflineRequest([1], 0)):
        with pytest.raises(ValueError, match="at least one token"):
            engine.run([wrong])
    with pytest.raises(ValueError, match="context of 64"):
        engine.run([OfflineRequest([1] * 60, 5)])


def test_batches_that_run_out_of_memory_are_split_until_every_request_has_its_answer(
    model: Path,
) -> None:
    engine = executor(model)
    memory = KvBudget(40 * engine.token_bytes, engine.token_bytes)
    engine.kv_bytes = memory.bytes
    queue = BatchQueue(S3(S3.Options()), oldest, memory)
    for at in range(10):
        # Predicted to be a quarter as long as they are.
        queue.add(BatchRequest(str(at), 0.0, input_tokens=4, predicted_tokens=4))
    answered: list[tuple[str, ...]] = []
    split = 0
    while (batch := queue.take(0.0)) is not None:
        ids = tuple(one.id for one in batch.requests)
        try:
            engine.run([OfflineRequest(prompt, 16) for prompt in prompts(*[4] * len(ids))])
        except OutOfMemoryError:
            assert queue.out_of_memory(batch) is None
            split += 1
        else:
            answered.append(ids)
    assert {one for ids in answered for one in ids} == {str(at) for at in range(10)}
    assert split == 4
    assert [len(ids) for ids in answered] == [2, 2, 1, 2, 2, 1]


def test_a_request_that_never_fits_is_told_of(model: Path) -> None:
    engine = executor(model, kv_bytes=1)
    queue = BatchQueue(S3(S3.Options()), oldest, KvBudget(1, engine.token_bytes))
    queue.add(large := BatchRequest("large", 0.0, input_tokens=4, predicted_tokens=4))
    batch = queue.take(0.0)
    assert batch is not None
    with pytest.raises(OutOfMemoryError):
        engine.run([OfflineRequest(prompt, 4) for prompt in prompts(4)])
    assert queue.out_of_memory(batch) == large

"""Who may lend and borrow, as the configuration says it."""

from __future__ import annotations

import re

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import LOCAL_NODE, Lending, Model, parse
from loomserve.platform.fleet.lending_pairs import check_reach, lenders_of, lending_options
from loomserve.platform.state.lending_options import LendingOptions
from tests.unit.platform.config.test_config import error_of, line_of

# Each field on a line of its own: an error has to find the line.
GOOD = """\
devices:
  - name: core0
    cores: [0]
  - name: core1
    cores: [1]
  - name: gpu0
    kind: cuda
    gpu: 0
models:
  - name: hot
    source: demo
    devices: [core0]
    replicas: 1
    engine:
      max_model_len: 4096
    lending:
      borrow_memory: 1GiB
      lenders: [cold]
  - name: cold
    source: demo
    devices: [core1]
    lending:
      lend_memory: 256MiB
      tpot_budget: 1.1
kvstore:
  memory: 256MiB
"""

BAD_FIELDS = [
    ("lend_memory: 256MiB", "lend_memory: 513MiB", "models[1].lending.lend_memory",
     "536870912 bytes of KV memory.*cannot lend more"),
    ("lend_memory: 256MiB", "lend: 256MiB", "models[1].lending.lend", "unknown field"),
    ("lend_memory: 256MiB", "lend_memory: 0", "models[1].lending.lend_memory", "more than zero"),
    ("tpot_budget: 1.1", "tpot_budget: 0.9", "models[1].lending.tpot_budget", "than 1"),
    ("tpot_budget: 1.1", "lent_share: 1.5", "models[1].lending.lent_share", "less than or equal"),
    ("tpot_budget: 1.1", "patience_ms: 0", "models[1].lending.patience_ms", "greater than 0"),
    ("tpot_budget: 1.1", "placement: random", "models[1].lending.placement", "'ratio'"),
    ("tpot_budget: 1.1", "lenders: [hot]", "models[1].lending.lenders", "without borrow_memory"),
    ("lenders: [cold]", "lend_memory: 1MiB\n      lenders: [cold]",
     "models[0].lending.lenders", "of no use with both borrow_memory and lend_memory"),
    ("lenders: [cold]", "lenders: [cold, warm]", "models[0].lending.lenders[1]",
     "cannot borrow from 'warm', which is not under models; those that lend: cold"),
    ("lenders: [cold]", "lenders: [hot]", "models[0].lending.lenders[0]",
     "cannot borrow from 'hot', which lends nothing; those that lend: cold"),
    ("max_model_len: 4096", "tensor_parallel_size: 2", "models[0].engine.tensor_parallel_size",
     "runs in one process"),
    ("max_model_len: 4096", "speculative_config: {method: ngram}",
     "models[0].engine.speculative_config", "speculative"),
    ("max_model_len: 4096", "runner: pooling", "models[0].engine.runner", "no answer that grows"),
    ("max_model_len: 4096", "kv_cache_dtype: fp8", "models[0].engine.kv_cache_dtype",
     "quantised KV"),
    ("max_model_len: 4096", "enforce_eager: false", "models[0].engine.enforce_eager",
     "between its operators"),
    ("max_model_len: 4096", "distributed_executor_backend: uni",
     "models[0].engine.distributed_executor_backend", "our own executor"),
    ("replicas: 1", "scheduling: {preemption: swap}", "models[0].scheduling.preemption",
     "only be computed again"),
    ("replicas: 1", "scheduling: {chunked_recompute: false}",
     "models[0].scheduling.chunked_recompute", "in chunks"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "field", "says"), BAD_FIELDS)
def test_a_wrong_field_is_named_with_its_line(old: str, new: str, field: str, says: str) -> None:
    line = line_of(GOOD, old) + new.count("\n")
    message = error_of(GOOD.replace(old, new, 1))
    where = re.escape(f"my.yaml:{line}: {field}: ")
    assert re.search(rf"^{where}.*{says}", message, re.MULTILINE), message


@pytest.mark.parametrize(
    "option",
    ["tensor_parallel_size: 1", "enforce_eager: true", "kv_cache_dtype: auto", "runner: auto"],
)
def test_options_of_the_engine_that_lending_needs_anyway_may_be_written(option: str) -> None:
    assert parse(GOOD.replace("max_model_len: 4096", option)).models[0].lending is not None


def test_who_borrows_needs_somebody_who_lends() -> None:
    gone = "    lending:\n      lend_memory: 256MiB\n      tpot_budget: 1.1\n"
    anybody = GOOD.replace("      lenders: [cold]\n", "")
    assert parse(anybody).models[0].lending is not None
    assert "models[0].lending.borrow_memory: model 'hot' has nobody" in error_of(
        anybody.replace(gone, "")
    )


def test_lending_that_says_neither_what_is_lent_nor_borrowed_is_refused() -> None:
    text = GOOD.replace("      lend_memory: 256MiB\n", "").replace("[cold]", "[]")
    assert "models[1].lending: give it lend_memory or borrow_memory" in error_of(text)


ON_GPUS = (
    GOOD.replace("gpu: 0\n", "gpu: 0\n  - name: gpu1\n    kind: cuda\n    gpu: 1\n")
    .replace("[core0]", "[gpu0]")
    .replace("[core1]", "[gpu1]")
    .replace("      borrow", "      experimental: true\n      borrow")
    .replace("      lend_", "      experimental: true\n      lend_")
)
REFUSED_ON_GPUS = [
    ("      experimental: true\n      lend_", "      lend_", "models[1].lending",
     "has not shown a gain yet.*set lending.experimental: true to try it"),
    ("replicas: 1", "model_runner: 2", "models[0].model_runner", "second model runner"),
    ("replicas: 1", "start: on_demand", "models[0].lending", "in sleep: set pinned: true"),
    ("max_model_len: 4096", "async_scheduling: true", "models[0].engine.async_scheduling",
     "once it is known that its loans still hold"),
    ("max_model_len: 4096", "enable_sleep_mode: true", "models[0].engine.enable_sleep_mode",
     "would stay in sleep"),
    ("max_model_len: 4096", "attention_backend: FLASHINFER",
     "models[0].engine.attention_backend", "FlashAttention alone"),
]  # fmt: skip


def test_on_gpus_what_is_experimental_is_asked_for() -> None:
    assert all(model.lending for model in parse(ON_GPUS).models)


@pytest.mark.parametrize(("old", "new", "field", "says"), REFUSED_ON_GPUS)
def test_what_gpus_cannot_lend_is_refused_by_feature(
    old: str, new: str, field: str, says: str
) -> None:
    assert old in ON_GPUS
    message = error_of(ON_GPUS.replace(old, new, 1))
    assert re.search(rf"^my\.yaml:\d+: {re.escape(field)}: .*{says}", message, re.MULTILINE), (
        message
    )


def test_on_gpus_nothing_is_lent_by_itself() -> None:
    auto = re.sub(r"lending:\n(      .*\n)+", "lending: auto\n", ON_GPUS)
    message = error_of(auto)
    assert re.search(r"models\[0\]\.lending: .*nothing is lent by itself: name lend_mem", message)


def test_a_gpu_borrows_from_none_whose_memory_it_does_not_reach() -> None:
    config = parse(ON_GPUS)
    check_reach(config, LOCAL_NODE, {(0, 2): "CNS", (1, 0): "NS"})
    check_reach(config, "elsewhere", {(0, 1): "CNS"})
    check_reach(parse(GOOD), LOCAL_NODE, {(0, 1): "CNS"})
    with pytest.raises(StartError, match=r"models\[0\]\.lending: .*GPU 0 .*'cold' on GPU 1.*CNS"):
        check_reach(config, LOCAL_NODE, {(0, 1): "CNS"})


def test_what_is_said_of_lending_reaches_the_engines() -> None:
    said = "borrow_memory: 1GiB\n      placement: ratio\n      lent_share: 0.25"
    config = parse(GOOD.replace("borrow_memory: 1GiB", f"{said}\n      patience_ms: 50"))
    hot, cold = (lending_options(model, config.models) for model in config.models)
    assert hot == LendingOptions(
        borrow_bytes=2**30, lenders=1, placement="ratio", lent_share=0.25, patience_ms=50
    )
    assert cold == LendingOptions(lend_bytes=256 * 2**20, tpot_budget=1.1)
    alone = Model(name="m", source="demo", devices=("core0",))
    assert lending_options(alone, config.models) is None


def test_who_names_no_lenders_borrows_from_all_that_lend_and_not_from_others() -> None:
    def model(name: str, **lending: object) -> Model:
        return Model(name=name, source="demo", devices=("core0",), lending=lending or None)

    hot = model("hot", borrow_memory=2**30)
    models = (hot, model("a", lend_memory=2**20), model("b"), model("c", lend_memory=2**20))
    assert lenders_of(hot, models) == ("a", "c")
    choosy = model("hot", borrow_memory=2**30, lenders=("c", "gone", "a"))
    assert lenders_of(choosy, models) == ("c", "a")
    assert lenders_of(models[1], models) == lenders_of(models[2], models) == ()
    options = lending_options(hot, models)
    assert options is not None
    assert options.lenders == 2


def test_replicas_of_a_model_that_lends_and_borrows_do_so_among_themselves() -> None:
    both = "lend_memory: 16MiB\n      borrow_memory: 1GiB"
    text = GOOD.replace("borrow_memory: 1GiB\n      lenders: [cold]", both)
    assert re.search(r"^my\.yaml:12: models\[0\]\.devices: .*has one device", error_of(text))
    text = text.replace("devices: [core0]", "devices: [core0, core1]")
    config = parse(text)
    hot, cold = config.models
    assert lenders_of(hot, config.models) == ("hot",)
    assert lending_options(hot, config.models) == LendingOptions(
        borrow_bytes=2**30, lend_bytes=16 * 2**20, lenders=1
    )
    other = cold.model_copy(update={"name": "other", "lending": Lending(borrow_memory=2**20)})
    assert lenders_of(other, config.models) == ("cold",)
    alone = error_of(text.replace("lend_memory: 256MiB", "borrow_memory: 1MiB"))
    assert "models[1].lending.borrow_memory: model 'cold' has nobody to borrow from" in alone

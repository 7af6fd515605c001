"""What an engine is started with."""

from __future__ import annotations

from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
from vllm.config import CacheConfig
from vllm.v1.worker.utils import request_memory

from loomserve.deployments.engine.app import _engine_options, _environment, front_end_of
from loomserve.platform.config import Device, Model, Server
from loomserve.platform.engine.options.known import of_engine
from loomserve.platform.engine.resumption.gpu_worker import ResumingGpuWorker
from loomserve.platform.fleet.messages import EngineSpec
from loomserve.platform.lending.engine.worker import TakesPartInLending
from loomserve.platform.scheduling.options import SchedulerOptions
from loomserve.platform.simulated.options import SIMULATED_CONFIG
from loomserve.platform.state import ChatParsers, ParserChoice
from loomserve.platform.state.lending_options import LendingOptions

GIB = 2**30
CORE, GPU = Device(name="d", cores=(0,)), Device(name="d", kind="cuda", gpu=0)


def spec_of(model: Model, *devices: Device) -> EngineSpec:
    return EngineSpec(
        model=model,
        devices=devices,
        path="org/m",
        internal_token="t",
        server=Server(drain_timeout_s=1),
        kv_transfer_config=None,
        lending=None,
        scheduling=SchedulerOptions(),
    )


@pytest.mark.parametrize("revision", [None, "0123abcd"])
def test_an_engine_fetches_the_configured_revision(revision: str | None) -> None:
    spec = spec_of(Model(name="m", source="org/m", revision=revision, devices=("d",)), CORE)
    assert _engine_options(spec).get("revision") == revision


@pytest.mark.parametrize(
    ("device", "start", "can_sleep"),
    [(GPU, "now", None), (GPU, "on_demand", True), (CORE, "on_demand", None)],
)
def test_a_gpus_engine_can_sleep_if_its_model_comes_and_goes(
    device: Device, start: str, can_sleep: bool | None
) -> None:
    model = Model.model_validate(
        {"name": "m", "source": "org/m", "devices": ("d",), "start": start}
    )
    assert _engine_options(spec_of(model, device)).get("enable_sleep_mode") is can_sleep


@pytest.mark.parametrize(
    ("device", "runner", "told"),
    [(GPU, 1, "0"), (GPU, 2, "1"), (GPU, None, None), (CORE, None, "0")],
)
def test_a_gpus_engine_has_the_model_runner_that_is_asked_for(
    device: Device, runner: int | None, told: str | None
) -> None:
    model = Model.model_validate(
        {"name": "m", "source": "org/m", "devices": ("d",), "model_runner": runner}
    )
    spec = spec_of(model, device)
    assert _environment(spec, _engine_options(spec)).get("VLLM_USE_V2_MODEL_RUNNER") == told


@pytest.mark.parametrize("device", [GPU, CORE])
def test_an_engine_that_lends_has_its_devices_worker_or_the_one_that_is_named(
    device: Device,
) -> None:
    own = {"name": "m", "source": "org/m", "devices": ("d",)}
    spec = spec_of(Model.model_validate(own), device)
    spec = spec.model_copy(update={"lending": LendingOptions(lend_bytes=GIB)})
    options = _engine_options(spec)
    worker = resolve_name(options["worker_cls"])
    assert issubclass(worker, TakesPartInLending)
    assert (device is GPU) == issubclass(worker, ResumingGpuWorker)
    assert options["enforce_eager"]
    assert options.get("async_scheduling") is (False if device is GPU else None)
    assert of_engine(options) == options
    assert _environment(spec, options)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    named = Model.model_validate(own | {"engine": {"worker_cls": "mine.Worker"}})
    options = _engine_options(spec.model_copy(update={"model": named}))
    assert options["worker_cls"] == "mine.Worker"
    assert "lending" in options["scheduler_cls"]


def test_a_second_engine_starts_on_a_gpu_that_another_fills_in_part() -> None:
    taken = SimpleNamespace(total_memory=80 * GIB, free_memory=20 * GIB, device_="cuda")
    options = _engine_options(spec_of(Model(name="m", source="org/m", devices=("d",)), GPU))
    assert options["kv_cache_memory_bytes"] > 0
    ours = CacheConfig(gpu_memory_utilization=options["gpu_memory_utilization"])
    assert 0 < request_memory(taken, ours) < GIB
    # Without it vLLM would refuse, although it is told how much KV memory there is.
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(taken, CacheConfig(kv_cache_memory_bytes=GIB))


def test_an_engine_has_room_for_adapters_that_are_replaced() -> None:
    given = {"max_loras": 2, "max_lora_rank": 32, "max_cpu_loras": 3}
    plain = Model(name="m", source="org/m", devices=("d",))
    model = Model(name="m", source="org/m", devices=("d",), adapters=given)
    options = _engine_options(spec_of(model, CORE))
    assert options["enable_lora"] is True
    assert {name: options[name] for name in given} == {**given, "max_cpu_loras": 6}
    assert "enable_lora" not in _engine_options(spec_of(plain, CORE))


def test_a_simulated_engine_is_told_its_times_and_gets_no_worker_or_scheduler_of_ours() -> None:
    simulated = {"seed": 3, "step_ms": 5.0}
    model = Model(name="m", source="simulated", devices=("d",), simulated=simulated)
    for device in (CORE, GPU):
        options = _engine_options(spec_of(model, device))
        assert not {"worker_cls", "scheduler_cls", "gpu_memory_utilization"} & set(options)
        assert options["additional_config"][SIMULATED_CONFIG]["step_ms"] == 5.0
    plain = model.model_copy(update={"simulated": None})
    assert _engine_options(spec_of(plain, CORE))["additional_config"][SIMULATED_CONFIG]["seed"] == 0
    real = Model(name="m", source="org/m", devices=("d",))
    assert SIMULATED_CONFIG not in _engine_options(spec_of(real, CORE))["additional_config"]


def test_a_front_end_and_its_engines_have_the_chosen_parsers() -> None:
    chosen = ChatParsers(
        tool_call=ParserChoice(name="hermes", why="w"), reasoning=ParserChoice(name=None, why="w")
    )
    model = Model(name="m", source="org/m", devices=("d",), engine={"tool_call_parser": ""})
    spec = spec_of(model, CORE).model_copy(update={"parsers": chosen})
    front_end = front_end_of(spec)
    options = front_end.engine_options
    assert (options["enable_auto_tool_choice"], options["tool_call_parser"]) == (True, "hermes")
    assert of_engine(options)["reasoning_parser"] == ""
    assert front_end.parsers == chosen

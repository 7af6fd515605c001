"""How many replicas memory allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import (
    Device,
    Idle,
    Model,
    OfflineModel,
    Pipeline,
    Roles,
    Simulated,
)
from loomserve.platform.devices.gpus import Gpu
from loomserve.platform.devices.memory import (
    GATEWAY_BYTES,
    GPU_ENGINE_BYTES,
    NODE_BYTES,
    PLATFORM_BYTES,
    SERVED_MODEL_BYTES,
    SIMULATED_BYTES,
    TOKENIZER_BYTES,
    NodeMemory,
    check_budgets,
    gpus_of,
    gpus_there,
    host_bytes,
    is_on_gpus,
    offline_bytes,
    plan_on_nodes,
    plan_replicas,
    platform_bytes,
    replica_bytes,
)

GIB = 2**30


def model(name: str, replicas: int | str = "auto", devices: int = 2) -> Model:
    places = tuple(f"d{i}" for i in range(devices))
    return Model(name=name, source="demo", devices=places, replicas=replicas)


def test_auto_takes_one_replica_a_device_where_memory_allows() -> None:
    assert plan_replicas([model("a"), model("b")], {"a": 0, "b": 0}, 100 * GIB) == {"a": 2, "b": 2}


def test_what_is_left_goes_round_in_turn() -> None:
    cost = replica_bytes(model("a"), 0)
    available = PLATFORM_BYTES + 3 * cost
    assert plan_replicas([model("a"), model("b")], {"a": 0, "b": 0}, available) == {"a": 2, "b": 1}


def test_too_little_memory_is_said_with_both_amounts_and_what_to_do() -> None:
    with pytest.raises(StartError, match=r"needs about .* GiB .* 2.0 GiB is available.*lower"):
        plan_replicas([model("a", replicas=2)], {"a": 0}, 2 * GIB)


def test_the_kv_store_takes_its_memory_before_replicas_grow() -> None:
    cost = replica_bytes(model("a"), 0)
    available = PLATFORM_BYTES + 2 * cost
    assert plan_replicas([model("a")], {"a": 0}, available, kvstore_bytes=0) == {"a": 2}
    assert plan_replicas([model("a")], {"a": 0}, available, kvstore_bytes=GIB // 2) == {"a": 1}
    with pytest.raises(StartError, match=r"lower kv_cache_memory, kvstore\.memory or replicas"):
        plan_replicas([model("a")], {"a": 0}, available, kvstore_bytes=64 * GIB)


def test_offline_models_take_their_memory_first() -> None:
    one = model("a", "auto", 2).model_copy(update={"kv_cache_memory": GIB})
    beside = OfflineModel(name="s", source="demo", device="d", kv_cache_memory=GIB)
    needed = offline_bytes(beside, GIB)
    assert needed > 3 * GIB
    available = PLATFORM_BYTES + 2 * replica_bytes(one, 0)
    assert plan_replicas([one], {"a": 0}, available + needed, offline_bytes=needed) == {"a": 2}
    assert plan_replicas([one], {"a": 0}, available + needed - 1, offline_bytes=needed) == {"a": 1}
    assert plan_replicas([one], {"a": 0}, available, gateways=2) == {"a": 1}
    assert plan_replicas([one], {"a": 0}, available + GATEWAY_BYTES, gateways=2) == {"a": 2}
    with pytest.raises(StartError):
        plan_replicas([one], {"a": 0}, available / 2, offline_bytes=needed)


def test_each_front_end_has_all_names_and_a_tokenizer_for_each_source() -> None:
    one = model("a", "auto", 2)
    served = [one, model("b"), model("c").model_copy(update={"source": "other"})]
    enough = PLATFORM_BYTES + 2 * replica_bytes(one, 0) + GATEWAY_BYTES
    enough += 2 * (3 * SERVED_MODEL_BYTES + 2 * TOKENIZER_BYTES)
    for available, replicas in ((enough, 2), (enough - 1, 1)):
        found = plan_replicas([one], {"a": 0}, available, gateways=2, served=served)
        assert found == {"a": replicas}


def test_auto_starts_at_least_the_replicas_that_roles_ask_for() -> None:
    separated = model("a", devices=4).model_copy(update={"roles": Roles(prefill=1, decode=2)})
    cost = replica_bytes(separated, 0)
    assert plan_replicas([separated], {"a": 0}, PLATFORM_BYTES + 3 * cost) == {"a": 3}
    with pytest.raises(StartError):
        plan_replicas([separated], {"a": 0}, PLATFORM_BYTES + 2 * cost)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 4 * GIB)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 64 * GIB),
)
def test_a_plan_fits_and_respects_every_bound(
    wanted: list[tuple[int, bool, int]], available: int
) -> None:
    models = [
        model(f"m{i}", "auto" if auto else devices, devices)
        for i, (devices, auto, _) in enumerate(wanted)
    ]
    weights = {f"m{i}": weight for i, (_, _, weight) in enumerate(wanted)}
    try:
        plan = plan_replicas(models, weights, available)
    except StartError:
        least = sum(
            (1 if m.replicas == "auto" else m.replicas) * replica_bytes(m, weights[m.name])
            for m in models
        )
        assert least + PLATFORM_BYTES > available
        return
    assert sum(plan[m.name] * replica_bytes(m, weights[m.name]) for m in models) <= available
    for m in models:
        assert 1 <= plan[m.name] <= len(m.devices)
        assert m.replicas in ("auto", plan[m.name])


def on_two_nodes(gib_one: float, gib_two: float) -> dict[str, NodeMemory]:
    return {
        "one": NodeMemory(gib_one * GIB, PLATFORM_BYTES),
        "two": NodeMemory(gib_two * GIB, NODE_BYTES, with_store=True),
    }


NODES = {"d0": "one", "d1": "two", "d2": "two"}


def test_each_replica_takes_memory_of_its_own_node() -> None:
    three = model("a", devices=3)
    cost = replica_bytes(three, 0) / GIB
    enough = PLATFORM_BYTES / GIB + cost, NODE_BYTES / GIB + 2 * cost
    assert plan_on_nodes([three], {"a": 0}, NODES, on_two_nodes(*enough)) == {"a": 3}
    less = enough[0], enough[1] - 0.1
    assert plan_on_nodes([three], {"a": 0}, NODES, on_two_nodes(*less)) == {"a": 2}
    assert plan_on_nodes([three], {"a": 0}, NODES, on_two_nodes(100, 1)) == {"a": 1}


def test_the_node_that_lacks_memory_is_named() -> None:
    both = model("a", replicas=2, devices=2)
    assert plan_on_nodes([both], {"a": 0}, NODES, on_two_nodes(8, 8)) == {"a": 2}
    with pytest.raises(StartError, match=r"on node 'two' and 1\.0 GiB .* kvstore\.memory"):
        plan_on_nodes([both], {"a": 0}, NODES, on_two_nodes(100, 1))
    with pytest.raises(StartError, match=r"on node 'one' and 1\.0 GiB .*lower kv_cache_memory or"):
        plan_on_nodes([both], {"a": 0}, NODES, on_two_nodes(1, 100))


def test_what_starts_with_the_platform_fits_into_its_devices() -> None:
    models = [model("a", devices=1), model("b")]
    cost = replica_bytes(models[0], 0)
    weights, one_each = {"a": 0, "b": 0}, {"a": 1, "b": 1}
    tight = [Device(name=f"d{core}", cores=(core,), memory=int(2 * cost)) for core in (0, 1)]
    check_budgets(models, weights, one_each, tight)
    check_budgets(models, weights, {"a": 1, "b": 2}, tight)
    small = [Device(name="d0", cores=(0,), memory=int(2 * cost) - 1)]
    with pytest.raises(StartError, match=r"device 'd0' may give .*devices\.memory.* a, b need"):
        check_budgets(models, weights, one_each, small)
    pipeline = model("p").model_copy(update={"pipeline": Pipeline()})
    check_budgets([pipeline], {"p": 0}, {"p": 1}, small)


def on(model: Model, *devices: str, **update: object) -> Model:
    return model.model_copy(update={"devices": devices, **update})


def test_an_engine_on_a_gpu_takes_its_memory_and_less_of_the_host_s() -> None:
    there = [Device(name="g", kind="cuda", gpu=0), Device(name="d0", cores=(0,))]
    assert gpus_of(there) == {"g"}
    big = on(model("a"), "g")
    assert (is_on_gpus(big, {"g"}), is_on_gpus(model("b"), {"g"})) == (True, False)
    assert replica_bytes(big, 16 * GIB, {"g"}) == GPU_ENGINE_BYTES + 16 * GIB + big.kv_cache_memory
    assert host_bytes(model("b"), GIB, {"g"}) == replica_bytes(model("b"), GIB)
    # Asleep it has its weights there.
    assert host_bytes(big, 16 * GIB, {"g"}) == GPU_ENGINE_BYTES
    sleeps = on(big, "g", idle=Idle())
    assert host_bytes(sleeps, 16 * GIB, {"g"}) == GPU_ENGINE_BYTES + 16 * GIB
    divided = on(big, "g", "h", pipeline=Pipeline())
    assert host_bytes(divided, 16 * GIB, {"g", "h"}) == 2 * GPU_ENGINE_BYTES
    # 20 GiB of KV memory are not the host's.
    gpu = {"g": Gpu(80 * GIB, 79 * GIB)}
    large = on(big, "g", kv_cache_memory=20 * GIB)
    enough = PLATFORM_BYTES + GPU_ENGINE_BYTES
    assert plan_replicas([large], {"a": 16 * GIB}, enough, gpus=gpu) == {"a": 1}
    with pytest.raises(StartError, match="is available: lower"):
        plan_replicas([large], {"a": 16 * GIB}, enough - 1, gpus=gpu)


def test_models_that_one_gpu_does_not_hold_together_are_refused_with_the_amounts() -> None:
    models = [on(model(name), "g", kv_cache_memory=20 * GIB) for name in "ab"]
    held = {"a": 16 * GIB, "b": 1 * GIB}
    needed = 57 * GIB + int(2 * GPU_ENGINE_BYTES)
    fits = {"g": Gpu(80 * GIB, needed)}
    assert plan_replicas(models, held, 64 * GIB, gpus=fits) == {"a": 1, "b": 1}
    lacks = {"g": Gpu(80 * GIB, needed - 1)}
    amounts = (
        r"^a, b need about 60\.8 GiB .* device 'g', and 60\.7 of its 80\.0 GiB are free: lower"
    )
    with pytest.raises(StartError, match=amounts):
        plan_replicas(models, held, 64 * GIB, gpus=lacks)
    # Whose driver tells nothing has whatever is asked for.
    assert plan_replicas(models, held, 64 * GIB, gpus={"g": Gpu(0, 0)}) == {"a": 1, "b": 1}


def test_replicas_grow_where_gpus_have_room() -> None:
    grows = on(model("a"), "g", "h", kv_cache_memory=20 * GIB)
    room = 20 * GIB + int(GPU_ENGINE_BYTES)
    gpus = {"g": Gpu(80 * GIB, room), "h": Gpu(80 * GIB, room)}
    assert plan_replicas([grows], {"a": 0}, 64 * GIB, gpus=gpus) == {"a": 2}
    gpus["h"] = Gpu(80 * GIB, room - 1)
    assert plan_replicas([grows], {"a": 0}, 64 * GIB, gpus=gpus) == {"a": 1}


def test_a_pipeline_takes_a_share_of_each_of_its_gpus() -> None:
    divided = on(model("a"), "g", "h", kv_cache_memory=20 * GIB, pipeline=Pipeline(layers=(3, 1)))
    room = int(0.75 * (20 * GIB + 2 * GPU_ENGINE_BYTES))
    gpus = {"g": Gpu(80 * GIB, room), "h": Gpu(80 * GIB, room)}
    assert plan_replicas([divided], {"a": 0}, 64 * GIB, gpus=gpus) == {"a": 1}
    gpus["h"] = Gpu(80 * GIB, room - 1)
    with pytest.raises(StartError, match="device 'h'"):
        plan_replicas([divided], {"a": 0}, 64 * GIB, gpus=gpus)


def test_what_there_is_of_devices_is_looked_up_by_node_and_number() -> None:
    devices = [
        Device(name="one-g", kind="cuda", gpu=1, node="one"),
        Device(name="two-g", kind="cuda", gpu=1, node="two"),
        Device(name="core", cores=(0,), node="one"),
    ]
    there = {"one": {1: Gpu(8, 7)}, "two": {0: Gpu(8, 6)}}
    assert gpus_there(devices, there) == {"one-g": Gpu(8, 7), "two-g": Gpu(0, 0)}


def test_a_simulated_model_takes_next_to_nothing_of_the_machine_whatever_it_stands_for() -> None:
    stands_for = Simulated(memory=80 * GIB)
    simulated = Model(
        name="s", source="simulated", devices=("g0",), kv_cache_memory="40GiB", simulated=stands_for
    )
    gpus = {"g0": Gpu(GIB, GIB)}
    assert not is_on_gpus(simulated, gpus)
    assert replica_bytes(simulated, 0, gpus) == SIMULATED_BYTES + 80 * GIB
    assert host_bytes(simulated, 0, gpus) == SIMULATED_BYTES
    available = platform_bytes(1, []) + SIMULATED_BYTES
    assert plan_replicas([simulated], {"s": 0}, available, gpus=gpus) == {"s": 1}
    device = Device(name="g0", kind="cuda", gpu=0, memory="64GiB")
    with pytest.raises(StartError, match=r"may give models 64.0 GiB"):
        check_budgets([simulated], {"s": 0}, {"s": 1}, [device])
    plain = simulated.model_copy(update={"simulated": None})
    check_budgets([plain], {"s": 0}, {"s": 1}, [device])

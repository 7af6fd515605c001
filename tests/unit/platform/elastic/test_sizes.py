"""What models are thought to take of a device."""

from __future__ import annotations

from loomserve.platform.config import Model
from loomserve.platform.devices.memory import ENGINE_BYTES, GPU_ENGINE_BYTES
from loomserve.platform.elastic.observe import ModelSizes
from loomserve.platform.state import Presence

GIB = 2**30


def test_a_gpu_is_without_the_weights_of_a_model_that_sleeps() -> None:
    sizes = ModelSizes({"g"})
    on_gpu, on_core = (
        Model(name=device, source="demo", devices=(device,), kv_cache_memory=20 * GIB)
        for device in ("g", "core")
    )
    for model in (on_gpu, on_core):
        sizes.set_weights(model.name, 16 * GIB)
    assert sizes.ready(on_gpu) == 36 * GIB + GPU_ENGINE_BYTES
    assert sizes.asleep(on_gpu) == GPU_ENGINE_BYTES
    awake, asleep = GPU_ENGINE_BYTES, GPU_ENGINE_BYTES + 16 * GIB
    assert sizes.on_host(on_gpu) == {Presence.READY: awake, Presence.ASLEEP: asleep}
    assert sizes.on_host(on_core) == {}
    assert sizes.ready(on_core) == 36 * GIB + ENGINE_BYTES
    assert sizes.asleep(on_core) == 16 * GIB + ENGINE_BYTES

"""What an engine is told of adapters, and when it forgets them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from loomserve.kvstore.engine.connector import StoreConnector
from loomserve.platform.engine.adapters.loaded import EngineAdapters


class Core:
    """An engine core that notes which adapters its workers have."""

    def __init__(self, most: int | None = 4) -> None:
        self.loaded: dict[int, str] = {}
        self.failing: set[int] = set()
        self.scheduler = SimpleNamespace(requests={}, connector=None)
        lora = None if most is None else SimpleNamespace(max_cpu_loras=most)
        self.vllm_config = SimpleNamespace(lora_config=lora)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        # As vLLM's: it fails once it holds its place.
        self.loaded[lora_request.lora_int_id] = lora_request.lora_path
        if lora_request.lora_int_id in self.failing:
            raise RuntimeError("\nthe sizes do not match\nTraceback")
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return self.loaded.pop(lora_id, None) is not None

    def ask(self, number: int) -> None:
        self.scheduler.requests["r"] = SimpleNamespace(lora_request=LoRARequest("a", number, "/a"))


def told(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": n, "name": f"a{n}@d", "path": f"/kept/{n}"} for n in numbers]


def test_it_has_what_is_wanted_and_no_more() -> None:
    core = Core()
    adapters = EngineAdapters(core)
    assert adapters.set(told(1, 2)) == {"problems": {}, "left": 0}
    assert core.loaded == {1: "/kept/1", 2: "/kept/2"}
    adapters.set(told(2, 3))
    assert core.loaded == {2: "/kept/2", 3: "/kept/3"}


def test_one_with_requests_stays_until_they_have_ended() -> None:
    core = Core()
    adapters = EngineAdapters(core)
    adapters.set(told(1))
    core.ask(1)
    core.scheduler.requests["plain"] = SimpleNamespace(lora_request=None)
    assert adapters.set([]) == {"problems": {}, "left": 1}
    assert adapters.own(LoRARequest("a1@d", 1, "/x")) is not None
    core.scheduler.requests.clear()
    assert adapters.set([]) == {"problems": {}, "left": 0}
    assert core.loaded == {}


def test_one_that_cannot_be_loaded_costs_the_others_nothing() -> None:
    core = Core()
    core.failing = {1}
    adapters = EngineAdapters(core)
    said = adapters.set(told(1, 2))
    assert said["problems"] == {"1": "the sizes do not match"}
    assert core.loaded == {2: "/kept/2"}
    core.failing.clear()
    assert adapters.set(told(1, 2))["problems"] == {}


def test_there_is_room_for_so_many_and_what_goes_makes_it_first() -> None:
    core = Core(most=2)
    adapters = EngineAdapters(core)
    assert list(adapters.set(told(1, 2, 3))["problems"]) == ["3"]
    assert adapters.set(told(2, 3))["problems"] == {}
    assert set(core.loaded) == {2, 3}


def test_a_request_gets_the_adapter_that_is_loaded_or_is_refused() -> None:
    adapters = EngineAdapters(Core())
    adapters.set(told(1))
    own = adapters.own(LoRARequest("a1@d", 1, "where it came from"))
    assert own is not None
    assert own.lora_path == "/kept/1"
    assert adapters.own(None) is None
    for other in (LoRARequest("a2@d", 2, "/x"), LoRARequest("a1@other weights", 1, "/x")):
        with pytest.raises(ValueError, match="is not loaded here"):
            adapters.own(other)


def test_an_engine_without_adapters_says_so() -> None:
    with pytest.raises(ValueError, match="without adapters"):
        EngineAdapters(Core(most=None)).set(told(1))


def test_the_stores_connector_knows_one_before_its_workers_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, learnt = Core(), list[str]()

    def learn(self: StoreConnector, adapter: LoRARequest) -> None:
        if adapter.lora_int_id == 2:
            raise FileNotFoundError("/kept/2 is not there")
        assert core.loaded == {}
        learnt.append(adapter.lora_name)

    monkeypatch.setattr(StoreConnector, "learn_adapter", learn)
    core.scheduler.connector = StoreConnector.__new__(StoreConnector)
    said = EngineAdapters(core).set(told(1, 2))
    assert learnt == ["a1@d"]
    assert (said["problems"], core.loaded) == ({"2": "/kept/2 is not there"}, {1: "/kept/1"})

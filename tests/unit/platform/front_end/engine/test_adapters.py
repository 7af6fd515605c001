"""Adapters between vLLM's serving layer, which knows names, and engines, which know keys."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest

from loomserve.platform.adapters.messages import Adapter, AdapterRoute
from loomserve.platform.front_end.engine.adapters import AdapterBook
from loomserve.platform.front_end.engine.open_requests import OpenRequest, digest
from tests.unit.platform.front_end.engine.scene import Scene, played, request, until


def route(number: int, digest: str, *replicas: str, leaves: bool = False) -> AdapterRoute:
    adapter = Adapter(
        name="sql", model="chat", id=number, digest=digest, source="loras/sql", rank=8
    )
    return AdapterRoute(adapter=adapter, replicas=replicas, leaves=leaves)


def asking(name: str, number: int = 1, tokens: int = 20) -> EngineCoreRequest:
    asked = request(name, tokens)
    asked.lora_request = LoRARequest("sql", number, "loras/sql")
    return asked


def test_vllm_finds_those_that_clients_may_ask_for() -> None:
    book, models = AdapterBook(), SimpleNamespace(lora_requests={"old": LoRARequest("old", 9, "x")})
    book.set([route(1, "d1", leaves=True), route(2, "d2")])
    book.serve_by(models)
    (found,) = models.lora_requests.values()
    assert (found.lora_name, found.lora_int_id) == ("sql", 2)
    book.set([])
    book.serve_by(models)
    assert models.lora_requests == {}


def test_other_weights_have_another_name_for_engines_and_routers() -> None:
    book = AdapterBook()
    book.set([route(1, "d1", leaves=True), route(2, "d2")])
    asked = [asking("a", 1), asking("b", 2)]
    for each in asked:
        book.address(each)
    assert [each.lora_request.lora_name for each in asked] == ["sql@d1", "sql@d2"]
    assert OpenRequest(asked[0]).route(frozenset({"a"})).adapter == "sql@d1"
    assert OpenRequest(request("c")).route(frozenset({"a"})).adapter is None
    # A query of death with one adapter is none with another.
    asked[1].prompt_token_ids = asked[0].prompt_token_ids
    assert digest(asked[0]) != digest(asked[1])


def test_a_request_goes_to_the_replica_that_has_its_adapter() -> None:
    async def play(scene: Scene) -> None:
        await scene.have("a", "b")
        scene.client.adapters.set([route(1, "d1", "b")])
        await scene.ask(asking("adapted"), on="b")
        await scene.ask(request("plain"), on="a")
        assert [each.candidates for each in scene.asked] == [{"b"}, {"a", "b"}]

    played(play)


def test_it_waits_until_one_has_it() -> None:
    async def play(scene: Scene) -> None:
        await scene.have("a")
        scene.client.adapters.set([route(1, "d1")])
        await scene.ask(asking("adapted"), on=None)
        assert scene.asked == []
        scene.client.adapters.set([route(1, "d1", "a")])
        await until(lambda: "adapted" in scene.engines["a"].work)

    played(play)


def test_it_ends_with_an_error_where_nobody_gets_it_in_time() -> None:
    async def play(scene: Scene) -> None:
        await scene.have("a")
        scene.client.adapters.set([route(1, "d1")])
        await scene.ask(asking("adapted"), on=None)
        await until(lambda: "adapted" in scene.failed)

    played(play)


def test_it_goes_on_with_the_weights_that_it_began_with() -> None:
    async def play(scene: Scene) -> None:
        await scene.have("a", "b", "c")
        scene.client.adapters.set([route(1, "d1", "a", "c")])
        await scene.ask(asking("adapted", tokens=400))
        scene.client.adapters.set([route(1, "d1", "a", "c", leaves=True), route(2, "d2", "a", "b")])
        await scene.engines["a"].step(2)
        await until(lambda: scene.got.get("adapted") == [0, 1])
        await scene.have("b", "c")
        await until(lambda: any("adapted" in name for name in scene.engines["c"].work))
        assert scene.asked[-1].candidates == {"c"}
        assert scene.asked[-1].adapter == "sql@d1"

    played(play)

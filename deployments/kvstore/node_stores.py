"""The stores of several nodes: one actor a node, each knows all others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.peers.messages import Member
from loomserve.kvstore.server.actor import ACTOR_NAME, NodeStoreActor
from loomserve.kvstore.server.options import StorePlan
from loomserve.kvstore.server.protocol import (
    Found,
    HotChain,
    HotChains,
    Hottest,
    Inspect,
    Lookup,
    Request,
    StoreUsage,
)
from loomserve.platform.base.errors import StartError
from loomserve.platform.base.periodic import every
from loomserve.platform.nodes.resources import name_in

_log = logging.getLogger("ray.serve")

_NAMESPACE = "loomserve"
_ANSWER_S = 5.0
_RETRY_S = 0.5
_FOLLOW_PERIOD_S = 1.0
_TAKE_OVER_S = 10.0
_COMPUTED_NEVER_S = 1000.0
# The command starts stores ahead of the controller.
_NO_CONTROLLER = 0

R = TypeVar("R")


class NodePlace(NamedTuple):
    """A node's name, and the address at which other nodes reach it."""

    name: str
    host: str


def living_places(among: Collection[str] = ()) -> dict[str, NodePlace]:
    """The nodes that are up, of the named ones or all, by Ray's ids: others each time they join."""
    return {
        node["NodeID"]: NodePlace(name, node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
        and (name := name_in(node["Resources"])) is not None
        and (not among or name in among)
    }


def store_actor_name(ray_id: str) -> str:
    return f"{ACTOR_NAME}-{ray_id}"


class NodeStores:
    """Keeps a store on each node, and tells each which others there are.

    Actors are detached: they outlive who follows the nodes, and the next controller finds them. Ray
    restarts one that dies, on its own node only. ``token`` is what the stores of the run know, and
    ``generation`` that of the controller.
    """

    def __init__(self, plan: StorePlan, token: str, generation: int) -> None:
        self._generation = generation
        self._plan = plan
        self._token = token
        # All by Ray's ids of the nodes.
        self._names: dict[str, str] = {}
        self._actors: dict[str, Any] = {}
        self._members: dict[str, Member] = {}
        self._problems: dict[str, str] = {}

    async def run(self) -> NoReturn:
        """Follow the nodes until the task is cancelled."""
        # Ray's own head may be away; the stores that there are then stay.
        await every(
            _FOLLOW_PERIOD_S, self.follow, failed=lambda error: _log.warning("stores: %r", error)
        )

    async def follow(self) -> None:
        """Start stores that are missing, let those of lost nodes go, and make all known to all.
        Raises if Ray does not say which nodes there are."""
        places = await asyncio.to_thread(living_places, self._plan.nodes)
        for node in self._actors.keys() - places.keys():
            # With its node, it would wait for ever to be started there again.
            ray.kill(self._actors.pop(node))
            self._members.pop(node, None)
        self._names = {node: place.name for node, place in places.items()}
        for node, place in places.items():
            if node not in self._actors:
                self._actors[node] = self._start(node, place)
        await self._acquaint()

    async def take_over(self, name: str) -> int:
        """Have other nodes fetch what one that is to leave has used last, as they have room for it.
        Returns the blocks that they have of it, or are fetching. It takes 10 s at most."""
        actors = {self._names[ray_id]: actor for ray_id, actor in self._actors.items()}
        room = {
            node: usage.state.capacity_bytes - usage.state.used_bytes
            for node, usage in (await _ask(actors, Inspect(), StoreUsage)).items()
            if node != name
        }
        if name not in actors or not room:
            return 0
        hottest = await _ask({name: actors[name]}, Hottest(sum(room.values())), HotChains)
        blocks, takers, until = 0, dict[bytes, str](), time.monotonic() + _TAKE_OVER_S
        for chain in hottest[name].chains if hottest else ():
            if time.monotonic() > until:
                break
            # Chains that begin alike stay together.
            first = chain.keys[:KEY_BYTES]
            taker = takers.setdefault(first, max(room, key=lambda node: room[node]))
            answers = await _ask({taker: actors[taker]}, _whatever_it_takes(chain), Found)
            if (found := answers.get(taker)) is not None:
                blocks += found.in_memory + found.remote
                room[taker] -= found.remote * chain.block_bytes
                await asyncio.sleep(min(found.ready_s, max(0.0, until - time.monotonic())))
        return blocks

    async def problems(self) -> Mapping[str, str]:
        """Why stores could not start, by the names of their nodes."""
        asked = {node: actor.problem.remote() for node, actor in self._actors.items()}
        said = await _gather(asked)
        return {
            self._names[ray_id]: problem for ray_id, problem in said.items() if problem is not None
        }

    async def members(self) -> Collection[Member]:
        """The stores that answer, and those that were too busy to answer in time."""
        asked = {node: actor.member.remote() for node, actor in self._actors.items()}
        for node, member in (await _gather(asked)).items():
            if member is None:
                self._members.pop(node, None)
            else:
                self._members[node] = member
        return list(self._members.values())

    def _start(self, ray_id: str, place: NodePlace) -> Any:
        options = {
            "name": store_actor_name(ray_id),
            "namespace": _NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(ray_id, soft=False),
        }
        made = ray.remote(NodeStoreActor).options(**options)
        return made.remote(self._plan.model_dump(mode="json"), place.name, place.host, self._token)

    async def _acquaint(self) -> None:
        """Tell each store of all that answer; one that does not is asked again the next time."""
        members = list(await self.members())
        await _gather(
            {
                node: actor.set_members.remote(members, self._generation)
                for node, actor in self._actors.items()
            }
        )
        for node, problem in (await self.problems()).items():
            if self._problems.get(node) != problem:
                self._problems[node] = problem
                _log.error("the KV store of node %s cannot start: %s", node, problem)


def start_node_stores(plan: StorePlan, token: str, timeout_s: float = 60.0) -> None:
    """Start a store on each node that is up, before engines are, which map its memory.
    ``StartError``: one cannot start, or not in time; the message says on which node."""

    async def start() -> None:
        stores = NodeStores(plan, token, _NO_CONTROLLER)
        async with asyncio.timeout(timeout_s):
            await stores.follow()
            while len(await stores.members()) < len(living_places(plan.nodes)):
                if problems := await stores.problems():
                    node, problem = next(iter(problems.items()))
                    raise StartError(f"the KV store of node {node} cannot start: {problem}")
                await asyncio.sleep(_RETRY_S)
            # Each knows all others from the beginning.
            await stores.follow()

    try:
        asyncio.run(start())
    except TimeoutError:
        raise StartError(
            f"the KV stores of all nodes were not there after {timeout_s:.0f} s"
        ) from None


async def stop_node_stores(timeout_s: float) -> None:
    """Stop the stores of all nodes, which frees their memory; blocks on SSD stay."""
    actors = await asyncio.to_thread(_store_actors)
    await _gather({name: actor.stop.remote() for name, actor in actors.items()}, timeout_s)
    for actor in actors.values():
        ray.kill(actor)


async def ask_stores(request: Request, expected: type[R]) -> dict[str, R]:
    """The answers of nodes' stores, by the nodes' names; those that do not answer are missing."""
    return await _ask(await asyncio.to_thread(_store_actors), request, expected)


async def _ask(actors: Mapping[str, Any], request: Request, expected: type[R]) -> dict[str, R]:
    """Likewise, of these actors."""
    answers = await _gather({name: actor.ask.remote(request) for name, actor in actors.items()})
    given = filter(None, answers.values())
    return {node: answer for node, answer in given if isinstance(answer, expected)}


def _store_actors() -> dict[str, Any]:
    """The actors of all nodes' stores, by their names."""
    actors, prefix = {}, store_actor_name("")
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == _NAMESPACE and named["name"].startswith(prefix):
            with contextlib.suppress(ValueError):  # it has just ended
                actors[named["name"]] = ray.get_actor(named["name"], _NAMESPACE)
    return actors


def _whatever_it_takes(chain: HotChain) -> Lookup:
    """A lookup for which everything is fetched that another node has."""
    return Lookup(
        chain.namespace, chain.keys, 0, lease_s=0.1, promote=False, block_s=_COMPUTED_NEVER_S
    )


async def _gather(
    asked: Mapping[str, Awaitable[Any]], timeout_s: float = _ANSWER_S
) -> dict[str, Any]:
    """The answers that came in time; None of actors that have ended."""

    async def one(name: str, answer: Awaitable[Any]) -> tuple[str, Any] | None:
        try:
            return name, await asyncio.wait_for(answer, timeout_s)
        except ray.exceptions.RayError as error:
            _log.debug("the KV store of %s has ended: %s", name, error)
            return name, None
        except TimeoutError:
            return None

    answers = await asyncio.gather(*(one(name, answer) for name, answer in asked.items()))
    return dict(answer for answer in answers if answer is not None)

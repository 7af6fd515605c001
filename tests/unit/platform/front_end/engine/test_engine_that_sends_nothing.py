"""An engine steps on, and its thread that sends outputs hangs: it ends as one that hangs does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from loomserve.platform.engine.core.host import EngineHost
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.simulated.options import SIMULATED_CONFIG
from tests.unit.platform.front_end.engine.scene import BOUNDS, Scene, played, request, until
from tests.waiting import PATIENCE_S

OPTIONS = {
    "kv_cache_memory_bytes": 2**28,
    "max_model_len": 4096,
    "additional_config": {SIMULATED_CONFIG: {"step_ms": 10, "token_ms": 0.01}},
}
# Nothing but its engine's end takes a request from a replica.
PATIENT = replace(BOUNDS, silence_s=600, hang_s=600, reroute_timeout_s=600, begun_timeout_s=600)
TOKENS = 600


def test_its_streams_go_on_with_the_same_tokens() -> None:
    async def play(made: Scene) -> None:
        hosts = {name: await engine(made) for name in ("a", "b")}
        try:
            made.client.set_replicas({name: host.address for name, host in hosts.items()})
            await until(lambda: set(made.client.replicas) == set(hosts), PATIENCE_S)
            asked = {name: request(name, TOKENS, temperature=0) for name in ("alone", "r")}
            made.first = "b"
            await made.client.add_request_async(asked["alone"])
            made.first = "a"
            await made.client.add_request_async(asked["r"])
            await until(lambda: len(made.got.get("r", ())) > 20, PATIENCE_S)
            a = made.client.replicas["a"]
            # Nobody is answered.
            hanging = asyncio.create_task(made.client._ask(a, "slow_outputs"))
            told: list[str] = []

            async def tell(why: str) -> None:
                told.append(why)

            await hosts["a"].end_if_wedged(tell, look_s=0.05)
            assert told == [
                "its steps went on, and its thread that sends outputs sent none in 30 turns"
            ]
            assert (await hosts["a"].ended()).endswith("so it was killed")
            await until(lambda: len(made.finished) == 2, PATIENCE_S)
            hanging.cancel()
            assert made.got["r"] == made.got["alone"]
            assert len(made.got["r"]) == TOKENS
            assert made.count("continued_requests_total", reason="gone") == 1
            assert not made.failed
        finally:
            for host in hosts.values():
                await host.stop(0)

    played(play, PATIENT)


async def engine(made: Scene) -> EngineHost:
    address = EngineAddress.in_folder(made.folder)
    start = EngineStart(options=OPTIONS, address=address, simulated=True)
    return await EngineHost.start(start, {}, PATIENCE_S)

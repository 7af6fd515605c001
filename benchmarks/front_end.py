"""How many chunks of streams, or whole answers, does one front end pass on, a second of one core?

How, and what was found: ``benchmarks/overhead.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.harness import NotMeasuredError, parser_of, ratios, run, spread
from benchmarks.load import prompts
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.models.simulated import fetch
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.simulated.core import SimulatedCore
from loomserve.platform.simulated.engine import SimulatedEngine
from loomserve.platform.simulated.options import SIMULATED_CONFIG
from loomserve.platform.simulated.wire import Outputs

KINDS = ("chunks", "whole")
BARE = "_bare"
ARMS = tuple(f"{kind}{ending}" for kind in KINDS for ending in ("", BARE))
MODEL = "m"
LONGEST = 2048
OPTIONS = {"max_model_len": LONGEST, "block_size": 32, "enforce_eager": True, "dtype": "float32"}
WHOLE_TOKENS = 48
FRONT_END_CORE, OTHER_CORE = 0, 1
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        streams: That are open at once.
        period_s: Between two tokens of a stream.
        seconds: Length of the measured window.
        warmup: Seconds before it.
        max_tokens: Of an answer.
        path: The endpoint.
        stream_interval: vLLM's: tokens that it puts into one chunk.
        stream: Whether answers are streamed; else the engine gives each in one step.
        bare: Whether there is no gateway on vLLM's serving layer.
    """

    streams: int
    period_s: float
    seconds: float
    warmup: float
    max_tokens: int
    path: str
    stream_interval: int
    stream: bool
    bare: bool


@dataclass
class Counted:
    """What has come so far."""

    chunks: int = 0
    requests: int = 0


class NotReadyError(NotMeasuredError):
    """The front end has no engine yet."""


async def served(port: int, plan: Plan, timeout_s: float = START_TIMEOUT_S) -> None:
    """Until a request is answered: the engine starts beside the front end.

    Raises:
        NotMeasuredError: none is in time.
    """
    deadline = time.monotonic() + timeout_s
    prompt = next(prompts("the first"))
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                return await _request(session, port, replace(plan, max_tokens=1), prompt, Counted())
            except NotReadyError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)


async def load(port: int, plan: Plan, process: psutil.Process) -> dict[str, float]:
    """Figures of the window; the streams are cut off at its end."""
    counted = Counted()
    source = prompts("front end")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream(number: int) -> None:
            # Spread, as streams' beginnings and ends are.
            await asyncio.sleep(plan.warmup / 2 * number / plan.streams)
            while True:
                await _request(session, port, plan, next(source), counted)

        tasks = [asyncio.create_task(stream(number)) for number in range(plan.streams)]
        try:
            await _sleep_while(tasks, plan.warmup)
            before, cpu_before, began = counted.chunks, _cpu_s(process), time.monotonic()
            requests_before, kernel_before = counted.requests, process.cpu_times().system
            await _sleep_while(tasks, plan.seconds)
            took, cpu = time.monotonic() - began, _cpu_s(process) - cpu_before
            kernel = process.cpu_times().system - kernel_before
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    chunks, requests = counted.chunks - before, counted.requests - requests_before
    if not (chunks if plan.stream else requests) or not cpu:
        raise NotMeasuredError(
            "nothing came within the window: measure longer (--seconds), on cores of its own"
        )
    common = {"requests_per_s": requests / took, "cores": cpu / took, "kernel_share": kernel / cpu}
    if not plan.stream:
        return {"per_core_s": requests / cpu, **common}
    return {
        "per_core_s": chunks / cpu,
        "chunks_per_s": chunks / took,
        "chunks_due_per_s": plan.streams / plan.period_s / plan.stream_interval,
        **common,
    }


async def _sleep_while(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _request(
    session: aiohttp.ClientSession, port: int, plan: Plan, prompt: str, counted: Counted
) -> None:
    asked = (
        {"messages": [{"role": "user", "content": prompt}]}
        if "chat" in plan.path
        else {"prompt": prompt}
    )
    body = {
        **{"model": MODEL, "max_tokens": plan.max_tokens, "ignore_eos": True},
        **{"stream": plan.stream, **asked},
    }
    url = f"http://127.0.0.1:{port}{plan.path}"
    last = b""
    async with session.post(url, json=body) as response:
        if response.status != 200:
            failure = NotReadyError if response.status == 503 else NotMeasuredError
            raise failure((await response.text())[:500])
        if not plan.stream:
            await response.read()
            counted.requests += 1
            return
        async for chunk in response.content.iter_any():
            counted.chunks += chunk.count(b"data: {")
            last = chunk
    if b"[DONE]" not in last:
        raise NotMeasuredError(last.decode(errors="replace")[-500:])
    counted.requests += 1


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


# The front end's process


async def serve_bare(given: dict[str, Any]) -> None:
    """Like :func:`serve`, without the gateway's part."""
    import uvicorn
    from prometheus_client import CollectorRegistry
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.output_processor import OutputProcessor

    from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
    from loomserve.platform.front_end.engine.serving import ModelServing
    from loomserve.platform.front_end.metrics import ContinuationMetrics
    from loomserve.platform.http.server import listen

    serving = ModelServing(
        MODEL,
        {**_options(given), "model": given["model"]},
        ReplicaSetClient(
            MODEL, lambda routing: "r1", ContinuationMetrics(CollectorRegistry()).of(MODEL)
        ),
    )
    await serving.start()
    serving.client.set_replicas({"r1": EngineAddress(*given["engine"])})
    app = await serving.server()
    app.state.openai_serving_chat.__class__ = OpenAIServingChat
    app.state.openai_serving_completion.__class__ = OpenAIServingCompletion
    serving.llm.output_processor.__class__ = OutputProcessor
    sock = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, http="httptools", log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    serve_http = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print(sock.getsockname()[1], flush=True)
    await serve_http


async def serve(given: dict[str, Any]) -> None:
    """Serve the model of the engine at ``given["engine"]`` until this is killed."""
    from prometheus_client import CollectorRegistry
    from starlette.applications import Starlette

    from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
    from loomserve.deployments.gateway.request_dispatcher import RequestDispatcher
    from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
    from loomserve.platform.config import Elastic, Model, Server
    from loomserve.platform.fleet.messages import FrontEndSpec, ModelRoute, ReplicaRoute
    from loomserve.platform.http.asgi import DirectPosts
    from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
    from loomserve.platform.http.protocol import Bounds
    from loomserve.platform.http.server import HttpServer, listen
    from loomserve.platform.lengths.service import LengthPredictions
    from loomserve.platform.requests.metrics import GatewayMetrics
    from loomserve.platform.state import ModelStatus

    async def never_asked(model: str) -> None:
        raise AssertionError("the model is ready")

    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    dispatcher = RequestDispatcher(
        "token",
        metrics,
        registry,
        idle_timeout_s=60,
        ask_for=never_asked,
        elastic=Elastic(),
    )
    route = ModelRoute(
        model=Model(
            name=MODEL,
            source="demo",
            devices=("core0",),
            max_concurrent_requests=4096,
            kvstore=False,
        ),
        status=ModelStatus.READY,
        max_model_len=LONGEST,
        front_end=FrontEndSpec(
            path=given["model"],
            engine_options=_options(given),
        ),
        replicas=(
            ReplicaRoute(
                id="r1", device="d", address="none.here", engine=EngineAddress(*given["engine"])
            ),
        ),
    )
    dispatcher.set_models([route])
    metrics.set_models({MODEL: ["r1"]})
    routes: Any = SimpleNamespace(choose=lambda fields, key: route)
    clients = ClientEndpoint(
        Server(max_sequences=1),
        routes,
        dispatcher,
        LengthPredictions(metrics),
        metrics,
        TokenMeter(KeyMetrics(registry), Path(given["folder"]) / "tokens.json"),
        isolates_tenants=False,
    )
    app = ingress_middleware(
        DirectPosts(
            {given["path"]: clients},
            Starlette(exception_handlers=exception_handlers),
        ),
        Server(),
        rejected=metrics.rejected,
    )
    sock = listen("127.0.0.1", 0)
    bounds = Bounds(head_timeout_s=10, max_connections=4096, send_timeout_s=30)
    server = HttpServer(app, sock, bounds=bounds)
    await server.start()
    print(sock.getsockname()[1], flush=True)
    await asyncio.Event().wait()


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return {**OPTIONS, "stream_interval": given["stream_interval"]}


# The engine's process


class AtOnce(SimulatedEngine):
    """It gives each answer in one step."""

    def end(self, now: float) -> dict[int, Outputs]:
        outputs = super().end(now)
        for output in [each for of_one in outputs.values() for each in of_one.outputs]:
            held = self.requests.get(output.request_id)
            if held is not None:
                output.new_token_ids += held.answer.tokens[held.given :]
                output.finish_reason = held.answer.reason
                self.abort([output.request_id])
        return outputs


def compute(given: dict[str, Any]) -> None:
    """Be the engine, until this is killed."""
    simulated = {
        **{"kv_tokens": 2**24, "step_ms": 1000 * given["period_s"], "token_ms": 0},
        **{"request_ms": 0, "context_token_ms": 0, "attention_pair_ms": 0},
    }
    options = {
        **{**OPTIONS, "max_num_seqs": 1024, "max_num_batched_tokens": 2**20},
        "additional_config": {SIMULATED_CONFIG: simulated},
    }
    start = EngineStart(options=options, address=EngineAddress(*given["engine"]), simulated=True)
    SimulatedCore(start, SimulatedEngine if given["stream"] else AtOnce).run()


# The command


def measure(plan: Plan) -> dict[str, float]:
    """Start both processes, load the front end, end them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        addresses = [f"ipc://{folder}/engine.{end}" for end in ("in", "out")]
        given = {
            "engine": addresses,
            "model": str(fetch()),
            "folder": folder,
            **asdict(plan),
        }
        engine = _start(OTHER_CORE, "--compute", given)
        front_end = _start(FRONT_END_CORE, "--serve", given)
        try:
            assert front_end.stdout is not None
            port = int(front_end.stdout.readline() or 0)
            if not port:
                raise NotMeasuredError("the front end did not start")
            uvloop.run(served(port, plan))
            return uvloop.run(load(port, plan, psutil.Process(front_end.pid)))
        finally:
            for process in (front_end, engine):
                process.kill()
                process.wait()


def _start(core: int, what: str, given: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.front_end", what, json.dumps(given)]
    return subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        stdout=subprocess.PIPE,
        env={**os.environ, "LOOMSERVE_RUN": tempfile.gettempdir(), "VLLM_LOGGING_LEVEL": "ERROR"},
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("front_end", __doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--runs", type=int, default=3, help="of each arm, in turns")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--period", type=float, default=0.02, help="seconds between two tokens")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--warmup", type=float, default=10)
    parser.add_argument("--max-tokens", type=int, help="1000; of whole answers 48, some 200 bytes")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--stream-interval", type=int, default=1)
    for process in ("--serve", "--compute"):
        parser.add_argument(process, type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def plan_of(arm: str, options: argparse.Namespace) -> Plan:
    stream = arm.startswith("chunks")
    most = options.max_tokens or (1000 if stream else WHOLE_TOKENS)
    return Plan(
        streams=options.streams,
        period_s=options.period,
        seconds=options.seconds,
        warmup=options.warmup,
        max_tokens=most,
        path=options.path,
        stream_interval=options.stream_interval,
        stream=stream,
        bare=arm.endswith(BARE),
    )


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    os.sched_setaffinity(0, {OTHER_CORE})
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    for number in range(options.runs):
        # Whichever of a pair comes first changes, so that a steady drift favours neither.
        for arm in options.arms if number % 2 == 0 else options.arms[::-1]:
            found[arm].append(figures := measure(plan_of(arm, options)))
            print(f"{arm}: {figures['per_core_s']:.0f} a second of a core", flush=True)
    return report(found)


def report(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Arms' figures, and what the front end passes on over vLLM's layer alone, run by run."""
    counts = {arm: [one["per_core_s"] for one in runs] for arm, runs in found.items()}
    return {
        "per_core_s": {arm: spread(values) for arm, values in counts.items()},
        "over_bare": {
            kind: ratios(counts[kind], counts[kind + BARE])
            for kind in KINDS
            if {kind, kind + BARE} <= counts.keys()
        },
        "arms": found,
    }


def main() -> int:
    options = parse()
    if options.compute:
        compute(options.compute)
    if given := options.serve:
        uvloop.run(serve_bare(given) if given["bare"] else serve(given))
        return 0
    return run("front_end", options, measured, without=("serve", "compute"))


if __name__ == "__main__":
    sys.exit(main())

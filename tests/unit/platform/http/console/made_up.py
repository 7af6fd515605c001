"""A platform of numbers: the admin API's answers of one with all that the console shows.

They are made of the API's own types, so that a field that is renamed fails here.
"""

from __future__ import annotations

import itertools
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from loomserve.platform.access.admin import KeysState, KeyState
from loomserve.platform.http.console.files import console_routes
from loomserve.platform.rebalancing.plans.plans import Plan, PlanStatus, PlanStep
from loomserve.platform.rebalancing.plans.reports import (
    ActionCount,
    DeviceLoad,
    Event,
    EventKind,
    Events,
    MadePlan,
    PlanList,
    RebalancingState,
)
from loomserve.platform.rebalancing.policy.actions import Move, MoveRequests
from loomserve.platform.rebalancing.policy.forecast import Forecast
from loomserve.platform.rebalancing.policy.heat import Level
from loomserve.platform.rebalancing.policy.limits import Reason
from loomserve.platform.rebalancing.policy.planner import RejectedStep
from loomserve.platform.rebalancing.policy.snapshot import MoveKind
from loomserve.platform.state import (
    AdapterState,
    AliasState,
    BatchLaneState,
    BatchState,
    BorrowingState,
    DeviceState,
    KvModelState,
    KvState,
    LendingPairState,
    LendingState,
    LoanState,
    ModelEvent,
    ModelEvents,
    ModelState,
    ModelStatus,
    NodeState,
    NodeStatus,
    OfflineModelState,
    Pace,
    PlatformState,
    Presence,
    ReplicaLoad,
    ReplicaState,
    ShardState,
    SoftwareVersions,
    WorkState,
)
from loomserve.platform.state.roles import Role
from loomserve.platform.tracing.admin import TracingState

TOKEN = "made-up-token"
TRACE_URL = "http://localhost:16686/trace/{trace_id}"
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
"""What a model's message would be that tries to run in the console."""
NOON = 1_790_000_000.0
MIB = 2**20


def loan(name: str, lender: str, **more: Any) -> LoanState:
    numbers = {
        "borrower": "chat", "borrower_replica": "chat-1", "lender_replica": f"{lender}-1",
        "draining": False, "phase": "open", "most_tokens": 4096, "age_s": 310.0,
        "usable_blocks": 128, "free_blocks": 40, "requests": 6, "tasks": 90_000,
        "wait_mean_us": 180.0, "wait_max_us": 2200.0, "wait_share": 0.04, "service_share": 0.11,
    }  # fmt: skip
    return LoanState.model_validate({"name": name, "lender": lender, **numbers, **more})


AWAY = ShardState(heads=1, phase="away", pause_s=0.02, copied_bytes=12 * MIB)
LOANS = (
    loan("loan-1", "mail"),
    loan("loan-2", "code", requests=14, shard=AWAY, wait_mean_us=95.0),
)


def replica(
    id_: str, device: str, turn: int, *, running: int, waiting: int = 0, **more: Any
) -> ReplicaState:
    load = ReplicaLoad(
        running=running,
        waiting=waiting,
        kv_cache_usage=min(0.97, running / 16),
        step_time_s=0.011,
        oldest_waiting_s=2.4 if waiting else 0.0,
        pace=Pace(prefill_token_s=0.0004, output_token_s=0.021, request_s=3.2),
        work=WorkState(prefill_s=1, attention_s=1, linear_s=1, tokens=90 * running * turn),
        requests=4321,
        measured_at=2.0 * turn,
    )
    fields = {
        "id": id_, "device": device, "address": "engine-1.10.0.0.1", "pid": 1, "engine_pid": 2,
        "draining": False, "role": Role.UNIFIED, "in_flight": running + waiting, "load": load,
    }  # fmt: skip
    return ReplicaState.model_validate({**fields, **more})


def model(name: str, status: ModelStatus, *replicas: ReplicaState, **more: Any) -> ModelState:
    fields = {
        "source": "demo", "target_replicas": max(1, len(replicas)), "router": "load_aware",
        "max_model_len": 8192, "devices": ("gpu0", "gpu1"), "replicas": replicas,
    }  # fmt: skip
    return ModelState.model_validate({"name": name, "status": status, **fields, **more})


def state(turn: int, more_models: int = 0) -> PlatformState:
    """As it is after some periods of two seconds."""
    borrowing = BorrowingState(
        own_blocks=200, own_free_blocks=3, loans=LOANS, broken={}, problems={}, switched_off=()
    )
    chat = (
        replica("chat-1", "gpu0", turn, running=15, waiting=7, borrowing=borrowing, node="ada"),
        replica("chat-2", "gpu1", turn, running=4, draining=True, node="ada"),
    )
    code = replica("code-1", "gpu1", turn, running=2, node="ada")
    mail = replica("mail-1", "gpu2", turn, running=1, node="bob")
    adapter = AdapterState(name="chat-de", source="/adapters/de", rank=8, replicas=("chat-1",))
    return PlatformState(
        versions=SoftwareVersions(loomserve="0.1.0", vllm="0.29.0", ray="2.60.0", python="3.11.4"),
        uptime_s=93_784.0,
        nodes=(
            NodeState(name="ada", status=NodeStatus.UP, gateways=1, replicas=3),
            NodeState(name="bob", status=NodeStatus.DOWN, gateways=0, replicas=1),
        ),
        devices=(
            DeviceState(name="gpu0", kind="cuda", node="ada", place="gpu 0", memory=80 * 2**30),
            DeviceState(name="gpu1", kind="cuda", node="ada", place="gpu 1"),
            DeviceState(name="gpu2", kind="cuda", node="bob", place="gpu 0"),
        ),
        models=(
            model("chat", ModelStatus.DEGRADED, *chat, target_replicas=3, adapters=(adapter,),
                  message="2 of 3 replicas are live"),
            model("code", ModelStatus.READY, code),
            model("mail", ModelStatus.READY, mail),
            model("org/translate", ModelStatus.ASLEEP),
            model("old", ModelStatus.FAILED, message=HOSTILE),
            *(model(f"name-{at}", ModelStatus.UNLOADED) for at in range(more_models)),
        ),
        aliases=(AliasState(name="assistant", models={"chat": 95, "code": 5}, sticky="key"),),
    )  # fmt: skip


LENDING = LendingState(
    models=(),
    pairs=(
        LendingPairState(borrower="chat", lender="mail", enabled=True, problem=None),
        LendingPairState(borrower="chat", lender="old", enabled=False, problem="it has no replica"),
    ),
    loans=LOANS,
    lent=(),
)
FORECAST = Forecast(gain=0.31, cost_s=0.4, pause_s=0.02, duration_s=2.5)
STEP = PlanStep(
    action=Move(kind=MoveKind.HEADS, engine="chat-1", lender="code-1", amount=1),
    source="gpu0", target="gpu1", raw=FORECAST, predicted=FORECAST,
)  # fmt: skip
PLAN = Plan(
    id="plan-3f2a91c0", created=NOON, steps=(STEP,), predicted=FORECAST, spread=0.84,
    rejected=(
        RejectedStep(
            action=MoveRequests(engine="chat-1", to="chat-2", requests=4),
            source="gpu0", target="gpu1", reason=Reason.NO_GAIN,
            detail="the gap would shrink by 0.4 %, and the least gain is 5 %",
        ),
        RejectedStep(
            action=Move(kind=MoveKind.LAYERS, engine="chat-1", lender="mail-1", amount=4),
            source="gpu0", target="gpu2", reason=Reason.NO_LINK,
            detail="gpu0 and gpu2 are on two nodes",
        ),
    ),
)  # fmt: skip
ENDED = PLAN.model_copy(
    update={"id": "plan-00c0ffee", "status": PlanStatus.DONE, "created": NOON - 900,
            "ended": NOON - 860, "real_gain": 0.27}
)  # fmt: skip
REBALANCING = RebalancingState(
    mode="advise",
    paused=False,
    problem=None,
    devices=(
        DeviceLoad(device="gpu0", compute=0.97, memory=0.88, level=Level.HOT),
        DeviceLoad(device="gpu1", compute=0.31, memory=0.41, level=Level.COLD),
        DeviceLoad(device="gpu2", compute=0.12, memory=0.35, level=Level.COLD),
    ),
    flaws=(),
    running=None,
    actions=(ActionCount(kind="heads", outcome="done", count=1),),
    rejected={"no_gain": 41, "no_link": 6},
)
KV = KvState(
    capacity_bytes=4096 * MIB, used_bytes=3200 * MIB, ssd_capacity_bytes=65536 * MIB,
    ssd_used_bytes=9000 * MIB, leases=2, writers=3, corrupt_blocks=0,
    models=(
        KvModelState(model="chat", blocks_in_memory=1500, blocks_on_ssd=5000,
                     bytes_in_memory=2200 * MIB, bytes_on_ssd=7300 * MIB, hit_blocks=90_000,
                     missed_blocks=41_000, evicted_blocks=310),
        KvModelState(model="code", blocks_in_memory=600, blocks_on_ssd=900,
                     bytes_in_memory=1000 * MIB, bytes_on_ssd=1700 * MIB, hit_blocks=0,
                     missed_blocks=0, evicted_blocks=0),
    ),
)  # fmt: skip
BATCHES = BatchLaneState(
    batches=(
        BatchState(id="batch_67f1", api_key="nightly", status="in_progress",
                   endpoint="/v1/chat/completions", created_at=int(NOON), expires_at=int(NOON),
                   total=12_000, completed=7_431, failed=2, in_flight=16, eta_s=1330.0, late=True),
    ),
    by_status={"completed": 4, "in_progress": 1}, answered_lines=52_210,
    failed_lines=11, retries=3,
    offline_models=(
        OfflineModelState(name="sums", ready=True, problem=None, batches=88, splits=1),
    ),
)  # fmt: skip
KEYS = KeysState(
    asked_for=True,
    problem=None,
    keys=(
        KeyState(name="alice", models=("chat",), requests_per_minute=60, max_concurrent=8),
        KeyState(name="nightly", tokens_per_day=2_000_000, expires_at="2026-01-31T00:00:00Z"),
    ),
)
USAGE = {
    "from": "2026-09-01T00:00:00Z", "to": "2026-09-21T14:13:00Z", "by": ["key", "model"],
    "usage": [
        {"key": "alice", "model": "chat", "requests": 812, "prompt_tokens": 220_113,
         "cached_tokens": 90_400, "completion_tokens": 101_007, "device_seconds": 5403.2},
        {"key": "", "model": "code", "requests": 3, "prompt_tokens": 40, "cached_tokens": 0,
         "completion_tokens": 96, "device_seconds": 1.9},
    ],
}  # fmt: skip
MODEL_EVENTS = ModelEvents(
    events=(
        ModelEvent(at=NOON, model="org/translate", presence=Presence.ASLEEP, why="idle for 300 s"),
        ModelEvent(at=NOON - 60, model="chat", presence=Presence.READY, why=HOSTILE),
    )
)
PLAN_EVENTS = Events(
    events=(Event(at=NOON - 30, kind=EventKind.PROPOSED, plan=PLAN.id, message="one step"),)
)
ANSWERS: dict[str, BaseModel] = {
    "lending": LENDING,
    "rebalancing": REBALANCING,
    "plans": PlanList.model_validate({"plans": (PLAN, ENDED)}, from_attributes=True),
    f"plans/{PLAN.id}": PLAN,
    "kv": KV,
    "batches": BATCHES,
    "keys": KEYS,
    "events": MODEL_EVENTS,
    "rebalancing/events": PLAN_EVENTS,
    "tracing": TracingState(enabled=True, trace_url=TRACE_URL),
}


class MadeUp:
    """The application, and what was asked of it."""

    def __init__(self, more_models: int = 0) -> None:
        self.more_models = more_models
        self.changes: list[tuple[str, str, Any]] = []
        """Method, path and body of each request for a change."""
        self.traces: list[str | None] = []
        """What each request of the chat said of its trace."""
        self.away = False
        """Whether each request for what there is is refused as by a controller that restarts."""
        self._turns = itertools.count(2)
        self.url = ""
        self.app = Starlette(
            routes=[
                *console_routes(),
                Route("/admin/v1/{path:path}", self._admin, methods=["GET"]),
                Route("/admin/v1/{path:path}", self._change, methods=["POST", "PUT", "DELETE"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/metrics", self._metrics),
            ]
        )

    async def _admin(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _error(401, "This is not the admin token.")
        path = request.path_params["path"]
        if self.away:
            return _error(503, "the controller is restarting")
        if path == "state":
            return _json(state(next(self._turns), self.more_models))
        if path == "usage":
            return JSONResponse(USAGE)
        return _json(ANSWERS[path]) if path in ANSWERS else _error(404, f"nothing at {path}")

    async def _change(self, request: Request) -> Response:
        body = await request.body()
        path = request.path_params["path"]
        self.changes.append((request.method, path, (await request.json()) if body else None))
        if path == "plans":
            return _json(MadePlan(plan=PLAN, rejected=PLAN.rejected))
        return _json(state(next(self._turns)))

    async def _metrics(self, _: Request) -> Response:
        samples = 'model="chat",front_end="0"} 4', 'model="chat",front_end="1"} 5'
        return PlainTextResponse("".join(f"loomserve_gateway_queue{{{one}\n" for one in samples))

    async def _chat(self, request: Request) -> Response:
        self.changes.append(("POST", "chat", await request.json()))
        self.traces.append(request.headers.get("traceparent"))

        async def events() -> Any:
            for text in ("Two ", "threads, ", HOSTILE):
                yield f'data: {{"choices": [{{"delta": {{"content": {_quoted(text)}}}}}]}}\n\n'
            yield 'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n'
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def _quoted(text: str) -> str:
    return JSONResponse(text).body.decode()


def _json(value: BaseModel) -> Response:
    return Response(value.model_dump_json(), media_type="application/json")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": "made_up"}}, status)

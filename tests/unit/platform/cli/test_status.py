from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from loomserve.platform.cli.status import loan_table, render, status
from loomserve.platform.cli.tables import display
from loomserve.platform.state import (
    AdapterState,
    AliasState,
    BorrowingState,
    ChatParsers,
    DeviceState,
    LoanState,
    ModelState,
    ModelStatus,
    NodeState,
    NodeStatus,
    ParserChoice,
    PlatformState,
    ReplicaLoad,
    ReplicaState,
    ScalingState,
    SchedulingState,
    ShardState,
    SoftwareVersions,
)
from loomserve.platform.state.roles import Role
from tests.unit import shown_tables

LOAD = ReplicaLoad(
    running=7, waiting=3, kv_cache_usage=0.4567, step_time_s=0.01234, measured_at=1.7e9
)
REPLICA = ReplicaState(
    id="r1", device="core0", address="engine-r1.127.0.0.1", pid=1, engine_pid=2, draining=False,
    role=Role.UNIFIED, in_flight=11, load=LOAD,
)  # fmt: skip
MODEL = ModelState(
    name="chat", source="demo", status=ModelStatus.READY, target_replicas=2, router="load_aware",
    replicas=(REPLICA, REPLICA.model_copy(update={"device": "core1", "draining": True})),
)  # fmt: skip
STATE = PlatformState(
    versions=SoftwareVersions(loomserve="1.2.3", vllm="4.5.6", ray="7.8.9", python="3.11.0"),
    uptime_s=3725,
    devices=(DeviceState(name="core0", kind="cpu", place="core 0", models=("chat",)),),
    models=(MODEL,),
)


@dataclass
class Answer:
    """What the server says next, and whom it heard."""

    status: int = 200
    body: bytes = STATE.model_dump_json().encode()
    token: str | None = None
    paths: list[str] = field(default_factory=list)


@pytest.fixture
def answer() -> Answer:
    return Answer()


@pytest.fixture
def url(answer: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer.paths.append(self.path)
            given = self.headers.get("Authorization")
            refused = answer.token is not None and given != f"Bearer {answer.token}"
            self.send_response(401 if refused else answer.status)
            self.end_headers()
            self.wfile.write(b"{}" if refused else answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    monkeypatch.delenv("LOOMSERVE_ADMIN_TOKEN", raising=False)
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))  # no token of whoever runs the tests
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str, token: str | None = None) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(status)
    result = CliRunner().invoke(app, arguments, env={"LOOMSERVE_ADMIN_TOKEN": token or ""})
    return result.exit_code, result.stdout, result.stderr


def printed(state: PlatformState, width: int = 160) -> str:
    return shown_tables.printed(render(state), width)


def row(text: str, *cells: str) -> bool:
    """Whether the text has a table row with these cells next to each other."""
    rows = shown_tables.rows(text)
    return any(list(cells) == one[i : i + len(cells)] for one in rows for i in range(len(one)))


def test_a_model_shows_its_status_and_a_line_a_replica() -> None:
    text = printed(STATE)
    load = ("7", "3", "45.7", "12.3", "11")
    assert row(text, "chat", "ready 1/2", "core0", *load)
    assert row(text, "core1 (draining)", *load)


def test_a_request_that_waits_for_long_shows_its_age() -> None:
    for oldest, cell in ((0.4, "3"), (12.4, "3 (12 s)")):
        load = LOAD.model_copy(update={"oldest_waiting_s": oldest})
        replica = REPLICA.model_copy(update={"load": load})
        model = MODEL.model_copy(update={"replicas": (replica,)})
        assert row(printed(STATE.model_copy(update={"models": (model,)})), "7", cell, "45.7")


def test_a_model_shows_what_reads_its_tool_calls_and_why() -> None:
    parsers = ChatParsers(
        tool_call=ParserChoice(name="hermes", why="the template writes <tool_call>"),
        reasoning=ParserChoice(name=None, why="the configuration says"),
    )
    model = MODEL.model_copy(update={"parsers": parsers})
    assert (
        "chat: tool calls: hermes (the template writes <tool_call>); "
        "reasoning: none (the configuration says)"
    ) in printed(STATE.model_copy(update={"models": (model,)}))


@pytest.mark.parametrize(("turnaround", "shown"), [(1.254, "1.25"), (None, "-")])
def test_engines_that_schedule_for_themselves_have_a_table(
    turnaround: float | None, shown: str
) -> None:
    scheduling = SchedulingState(
        queue="fair", preemption="adaptive", swapped_out=5, swapped_in=4, recomputed=3,
        swap_used_bytes=2 << 20, swap_capacity_bytes=64 << 20, step_time_error=0.02,
        swap_time_error=None,
    )  # fmt: skip
    change = {"scheduling": scheduling, "weighted_turnaround": turnaround}
    replica = REPLICA.model_copy(update={"load": LOAD.model_copy(update=change)})
    model = MODEL.model_copy(update={"replicas": (REPLICA, replica)})
    text = printed(STATE.model_copy(update={"models": (model,)}))
    assert row(text, "chat", "core0", "fair", "adaptive", shown, "5", "3", "2/64")
    assert "Scheduling" not in printed(STATE)


def test_loans_show_where_there_are_any() -> None:
    loan = LoanState(
        name="loan-1", borrower="chat", borrower_replica="r1", lender="cold", lender_replica="c1",
        draining=True, phase="stopped", most_tokens=9, age_s=9, usable_blocks=40, free_blocks=10,
        requests=3, tasks=600, wait_mean_us=12.4, wait_max_us=900, wait_share=0.034,
        service_share=0.2,
    )  # fmt: skip
    borrowing = BorrowingState(
        own_blocks=8, own_free_blocks=1, loans=(loan,), broken={}, problems={}, switched_off=()
    )
    replica = REPLICA.model_copy(update={"borrowing": borrowing})
    model = MODEL.model_copy(update={"replicas": (REPLICA, replica)})
    text = printed(STATE.model_copy(update={"models": (model,)}))
    figures = ("3", "30/40", "12", "900", "3.4", "20.0")
    assert row(text, "loan-1", "chat", "cold", *figures, "stopped, draining")
    assert "Loans" not in printed(STATE)


@pytest.mark.parametrize(
    ("part", "shown"),
    [({"heads": 2}, "2 heads away"), ({"layers": (20, 30)}, "layers 20 to 29 away")],
)
def test_a_part_that_is_with_a_lender_is_named(part: dict[str, Any], shown: str) -> None:
    away = ShardState(**part, phase="away", pause_s=0.1, copied_bytes=5)
    loan = LoanState(
        name="loan-1", borrower="chat", borrower_replica="r1", lender="cold", lender_replica="c1",
        draining=False, phase="open", most_tokens=9, age_s=9, usable_blocks=0, free_blocks=0,
        requests=0, tasks=600, wait_mean_us=12.4, wait_max_us=900, wait_share=0.034,
        service_share=0.2, shard=away,
    )  # fmt: skip
    assert row(shown_tables.printed(loan_table([loan])), "20.0", shown)


def test_aliases_show_who_gets_which_share_and_whether_it_is_there() -> None:
    aliases = (
        AliasState(name="canary", models={"chat": 95, "gone": 5}, sticky="key"),
        AliasState(name="small", models={"chat": 1}, sticky=None),
    )
    text = printed(STATE.model_copy(update={"aliases": aliases}))
    assert row(text, "canary", "chat", "ready", "key", "95", "95.0")
    assert row(text, "gone", "not loaded", "5", "5.0")
    assert row(text, "small", "chat", "ready", "-", "1", "100.0")
    assert "Aliases" not in printed(STATE)


def test_adapters_show_who_has_them_and_why_others_have_not() -> None:
    adapters = (
        AdapterState(name="sql", source="loras/sql", rank=8, digest="d", replicas=("r1",)),
        AdapterState(name="broken", source="loras/x", message="there is no folder loras/x"),
    )
    model = MODEL.model_copy(update={"adapters": adapters, "replicas": (REPLICA, REPLICA)})
    text = printed(STATE.model_copy(update={"models": (model,)}))
    assert row(text, "sql", "chat", "loras/sql", "8", "1/2")
    assert row(text, "broken", "chat", "loras/x", "-", "0/2")
    assert "broken of chat: there is no folder loras/x" in text
    assert "Adapters" not in printed(STATE)


def test_a_role_shows_beside_the_device() -> None:
    decode = REPLICA.model_copy(update={"role": Role.DECODE})
    both = (decode, decode.model_copy(update={"role": Role.PREFILL, "draining": True}))
    model = MODEL.model_copy(update={"replicas": both})
    text = printed(STATE.model_copy(update={"models": (model,)}))
    assert row(text, "ready 1/2", "core0 (decode)")
    assert row(text, "core0 (prefill, draining)")


def test_devices_versions_and_uptime_are_shown() -> None:
    text = printed(STATE)
    assert row(text, "core0", "cpu", "core 0", "chat")
    assert "loomserve 1.2.3, vLLM 4.5.6, Ray 7.8.9, Python 3.11.0, up 1 h 2 min" in text


def test_nodes_show_where_there_is_a_cluster() -> None:
    assert "Nodes" not in printed(STATE)
    devices = tuple(
        DeviceState(name=name, kind="cpu", node=node, place="cores 0")
        for name, node in (("d0", "one"), ("d1", "two"))
    )
    nodes = (
        NodeState(name="one", status=NodeStatus.UP, gateways=1, replicas=2),
        NodeState(name="two", status=NodeStatus.DRAINING, gateways=1, replicas=0),
    )
    text = printed(STATE.model_copy(update={"devices": devices, "nodes": nodes}))
    assert row(text, "one", "up", "1", "2")
    assert row(text, "two", "draining", "1", "0")
    assert row(text, "d1", "two", "cpu", "cores 0", "-")


def test_a_replica_without_a_report_shows_dashes() -> None:
    silent = MODEL.model_copy(update={"replicas": (REPLICA.model_copy(update={"load": None}),)})
    text = printed(STATE.model_copy(update={"models": (silent,)}))
    assert row(text, "core0", "-", "-", "-", "-", "11")


@pytest.mark.parametrize("model_status", ModelStatus)
def test_a_model_that_is_not_ready_says_why_letter_for_letter(model_status: ModelStatus) -> None:
    change = {"status": model_status, "message": "no [core] left", "replicas": ()}
    text = printed(STATE.model_copy(update={"models": (MODEL.model_copy(update=change),)}))
    assert row(text, "chat", f"{model_status} 0/2")
    assert "no [core] left" in text


def test_a_model_that_is_scaled_shows_its_bounds_and_what_was_decided() -> None:
    scaling = ScalingState(min=0, max=3, fixed=False, why="requests exceed what it has")
    scaled = MODEL.model_copy(update={"scaling": scaling})
    shown = printed(STATE.model_copy(update={"models": (scaled,)}))
    assert "chat: 2 of 0 to 3 replicas: requests exceed what it has" in shown


def test_names_and_states_are_whole_in_80_columns() -> None:
    models = tuple(
        MODEL.model_copy(update={"name": name, "status": ModelStatus.DEGRADED})
        for name in ("smollm2-135m", "smollm2-135m-8k")
    )
    text = printed(STATE.model_copy(update={"models": models}), width=80)
    for model in models:
        assert row(text, model.name, "degraded 1/2", "core0", "7", "3", "45.7", "12.3", "11")
    assert "…" not in text


def test_a_row_is_a_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    model = MODEL.model_copy(update={"message": "the engine ended: " + "why " * 40})
    display(render(STATE.model_copy(update={"models": (model,)})))
    assert row(capsys.readouterr().out, f"chat: {model.message}".strip())


def test_a_platform_without_models_says_so() -> None:
    assert "No model is loaded." in printed(STATE.model_copy(update={"models": ()}))


@settings(deadline=None, max_examples=10)
@given(st.builds(PlatformState, uptime_s=st.floats(0, 1e9)))
def test_every_state_can_be_rendered_and_names_its_models(state: PlatformState) -> None:
    assert "Models" in printed(state)


def test_the_table_is_printed_for_people(url: str, answer: Answer) -> None:
    code, out, err = run("--url", url + "/")
    assert (code, err) == (0, "")
    assert "chat" in out
    assert answer.paths == ["/admin/v1/state"]


def test_json_is_the_state_and_nothing_else(url: str) -> None:
    code, out, err = run("--url", url, "--json")
    assert (code, err) == (0, "")
    assert PlatformState.model_validate(json.loads(out)) == STATE


@pytest.mark.parametrize("way", ["option", "environment"])
def test_the_token_opens_the_admin_api(url: str, answer: Answer, way: str) -> None:
    answer.token = "secret"
    option = ("--token", "secret") if way == "option" else ()
    code, _, err = run("--url", url, *option, token="secret" if way == "environment" else None)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("token", "says"), [(None, "asks for an admin token"), ("wrong", "refuses this admin token")]
)
def test_without_the_right_token_the_error_says_how_to_pass_it(
    url: str, answer: Answer, token: str | None, says: str
) -> None:
    answer.token = "secret"
    code, out, err = run("--url", url, *(("--token", token) if token else ()))
    assert (code, out) == (1, "")
    assert says in err
    assert "--token or LOOMSERVE_ADMIN_TOKEN" in err


def test_the_users_own_token_opens_the_admin_api_of_this_machine(
    url: str, answer: Answer, tmp_path: Path
) -> None:
    write_token(tmp_path, "secret")
    answer.token = "secret"
    code, _, err = run("--url", url)
    assert (code, err) == (0, "")


def test_a_given_token_goes_before_the_users_own(url: str, answer: Answer, tmp_path: Path) -> None:
    write_token(tmp_path, "another platform's")
    answer.token = "secret"
    assert run("--url", url, "--token", "secret")[0] == 0


@pytest.mark.parametrize("scheme", ["http_proxy", "all_proxy"])
def test_a_proxy_does_not_see_what_is_asked_of_this_machine(
    url: str, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.setblocking(False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.setenv(scheme, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert run("--url", url)[0] == 0
        with pytest.raises(BlockingIOError):
            proxy.accept()


def write_token(folder: Path, token: str) -> None:
    path = folder / "admin-token"
    path.touch(mode=0o600)
    path.write_text(token)


@pytest.mark.parametrize("option", [(), ("--json",), ("--watch",), ("--json", "--watch")])
def test_if_nothing_listens_the_error_says_how_to_start(option: tuple[str, ...]) -> None:
    with socket.socket() as bound:  # bound but not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        code, _, err = run("--url", f"http://127.0.0.1:{bound.getsockname()[1]}", *option)
    assert code == 1
    assert "loomserve serve" in err
    assert "--url" in err


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(status=503), "answered 503; it may still be starting"),
        (Answer(status=404), "answered 404 with something that is not Loomserve's state"),
        (Answer(body=b"<html>"), "not Loomserve's state"),
        (Answer(body=b"{}"), "not Loomserve's state"),
    ],
)
def test_other_answers_are_explained(url: str, says: str) -> None:
    code, out, err = run("--url", url)
    assert (code, out) == (1, "")
    assert says in err


@pytest.mark.parametrize("bad", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://a:b"])
def test_a_malformed_url_is_explained(bad: str) -> None:
    code, _, err = run("--url", bad)
    assert code == 1
    assert "--url" in err
    assert "http://127.0.0.1:8000" in err

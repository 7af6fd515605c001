"""One engine's process, and clients that come, go, fall silent and do not read."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.engine import EXACT_BLOCK_BYTES
from loomserve.platform.base.errors import StartError
from loomserve.platform.engine.core.host import EngineEnded, EngineHost
from loomserve.platform.lending.messages import BorrowerEngine
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG
from loomserve.platform.state.lending_options import LENDING_CONFIG
from tests.integration.served_engine import (
    BareClient,
    ServedEngine,
    answers,
    connected,
    engine_start,
    environment,
    pump_until,
    served,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

PROMPT = list(range(1000, 1040))
SILENCE_S = 3.0


def open_requests(engine: ServedEngine) -> int:
    """As the engine counts them."""
    load = engine.run(engine.host.stats(timeout_s=5))
    return load.running + load.waiting


def endless(client: BareClient, **params: object) -> str:
    return client.add(PROMPT, max_tokens=400, ignore_eos=True, **params)


def test_two_gateways_get_each_their_own(served_engine: ServedEngine) -> None:
    with connected(served_engine.address) as one, connected(served_engine.address) as other:
        names = one.add(PROMPT), other.add(PROMPT[1:])
        pump_until(
            lambda: bool(one.streams[names[0]].finish and other.streams[names[1]].finish),
            one, other,
        )  # fmt: skip
        (alone,) = answers(one, [one.add(PROMPT[1:])])
        assert one.streams[names[0]].tokens != alone.tokens
        assert other.streams[names[1]].tokens == alone.tokens
        assert one.ready[0]["max_model_len"] == 512
        assert served_engine.host.facts.max_model_len == 512
        pump_until(lambda: bool(one.beats), one)
        steps = one.beats[-1][0]
        assert steps >= 48, "it counts its steps"
        answers(one, [one.add(PROMPT, max_tokens=4)])
        pump_until(lambda: one.beats[-1][0] >= steps + 4, one)


def test_an_engine_of_one_process_listens_at_no_port(served_engine: ServedEngine) -> None:
    process = psutil.Process(served_engine.host.pid)
    of_engine = [process, *process.children(recursive=True)]
    inet = [each for one in of_engine for each in one.net_connections("inet")]
    assert [each.laddr for each in inet if each.status == psutil.CONN_LISTEN] == []


def test_each_hears_of_the_others_requests_within_a_step(served_engine: ServedEngine) -> None:
    with connected(served_engine.address) as busy, connected(served_engine.address) as idle:
        names = [endless(busy) for _ in range(3)]
        pump_until(
            lambda: (
                all(busy.streams[name].tokens for name in names)
                and all(any(load.running == 3 for _, load in each.loads) for each in (busy, idle))
            ),
            *(busy, idle),
        )
        heard_at, load = next(each for each in idle.loads if each[1].running == 3)
        first = next(at for at, each in busy.loads if each.running == 3)
        # Nobody asked for it, and a poll would be a second away.
        assert heard_at - first < 0.5
        assert load.counted == 0
        last = busy.loads[-1][1]
        assert (last.counted, last.running + last.waiting) == (3, 3)
        assert 0 < last.kv_usage < 1
        # One of its own: the load that comes with its first token has counted it.
        own = endless(idle)
        pump_until(lambda: bool(idle.streams[own].tokens), busy, idle)
        last = idle.loads[-1][1]
        assert (last.counted, last.running + last.waiting) == (1, 4)
        # What ends without an output is told, too.
        busy.abort(*names)
        pump_until(lambda: idle.loads[-1][1].running == 1, busy, idle)
        idle.abort(own)
        pump_until(lambda: idle.loads[-1][1].running + idle.loads[-1][1].waiting == 0, busy, idle)
        assert idle.loads[-1][1].kv_usage == 0


def test_a_silent_clients_requests_end_and_the_others_go_on(tmp_path: Path) -> None:
    start = engine_start(str(catalog.resolve("demo", tmp_path)), tmp_path, SILENCE_S)
    with (
        served(start) as engine,
        connected(engine.address) as silent,
        connected(engine.address) as other,
    ):
        for _ in range(2):
            endless(silent)
        kept = endless(other)
        pump_until(lambda: open_requests(engine) == 3, silent, other)
        fell_silent = time.monotonic()
        pump_until(lambda: open_requests(engine) == 1, other, within_s=SILENCE_S + 2)
        assert time.monotonic() - fell_silent > SILENCE_S - 1.5
        assert other.streams[kept].finish is None
        came = len(other.streams[kept].tokens)
        pump_until(lambda: len(other.streams[kept].tokens) > came + 5, other)
        other.abort(kept)
        pump_until(lambda: open_requests(engine) == 0, other)

        # It learns of it when it speaks again, and is served as before.
        pump_until(lambda: len(silent.ready) == 2, silent)
        assert len(answers(silent, [silent.add(PROMPT, max_tokens=4)])[0].tokens) == 4


def test_a_client_that_comes_back_has_nothing_left(served_engine: ServedEngine) -> None:
    with connected(served_engine.address, identity=b"comes back") as first:
        endless(first)
        pump_until(lambda: all(each.tokens for each in first.streams.values()), first)
    with connected(served_engine.address, identity=b"comes back") as again:
        pump_until(lambda: open_requests(served_engine) == 0, again, within_s=2)
        assert len(answers(again, [again.add(PROMPT, max_tokens=8)])[0].tokens) == 8


def test_a_client_that_is_gone_leaves_no_request(served_engine: ServedEngine) -> None:
    with connected(served_engine.address) as other:
        with connected(served_engine.address) as gone:
            endless(gone)
            pump_until(lambda: all(each.tokens for each in gone.streams.values()), gone, other)
        pump_until(lambda: open_requests(served_engine) == 0, other, within_s=2)


def test_a_client_that_does_not_read_stops_nobody(served_engine: ServedEngine) -> None:
    with connected(served_engine.address) as other:
        # The first step with log probabilities takes seconds on a busy machine.
        answers(other, [other.add(PROMPT, max_tokens=2, logprobs=20)])
    with (
        connected(served_engine.address, high_water=1) as slow,
        connected(served_engine.address) as other,
    ):
        # Large outputs fill what there is between the two soon, once nobody reads them.
        unread = [endless(slow, logprobs=20) for _ in range(4)]
        kept = endless(other)
        all_ = [*(slow.streams[name] for name in unread), other.streams[kept]]
        pump_until(lambda: all(stream.tokens for stream in all_), slow, other)

        def are_open(requests: int) -> bool:
            """Whether there are so many; it is not for silence that one is let go."""
            slow.hello()
            return open_requests(served_engine) == requests

        pump_until(lambda: are_open(1), other, within_s=45)
        gaps = [
            b - a for a, b in zip(*(other.streams[kept].came_at[n:] for n in (0, 1)), strict=False)
        ]
        assert max(gaps) < 2.0
        other.abort(kept)
        pump_until(lambda: open_requests(served_engine) == 0, other)


def test_what_is_no_request_harms_nobody(served_engine: ServedEngine) -> None:
    with connected(served_engine.address) as client:
        for frames in (
            [b"\x00", b"nonsense"],
            [b"\x04", b""],
            [b"\x77"],
            [b"\x03", b"\xc1"],
            [b""],
        ):
            client.input.send_multipart(frames)
        assert len(answers(client, [client.add(PROMPT, max_tokens=4)])[0].tokens) == 4


def test_the_replica_is_told_the_load_and_may_call(served_engine: ServedEngine) -> None:
    host = served_engine.host
    with connected(served_engine.address) as client:
        names = [endless(client) for _ in range(3)]
        pump_until(lambda: all(client.streams[name].tokens for name in names), client)
        load = served_engine.run(host.stats(timeout_s=5))
        assert load.running == 3
        assert load.kv_cache_usage > 0
        assert load.step_time_s > 0
        client.abort(*names)
        pump_until(lambda: open_requests(served_engine) == 0, client)
        answers(client, [client.add(PROMPT, max_tokens=8, ignore_eos=True)])
        load = served_engine.run(host.stats(timeout_s=5))
        assert load.pace is not None
        assert load.work.tokens > 3 * len(PROMPT)
        assert load.weighted_turnaround is not None
    assert served_engine.run(host.collective_rpc("check_health", timeout_s=5)) == [None]
    with pytest.raises(RuntimeError, match="neither lends nor borrows"):
        served_engine.run(host.collective_rpc("loans.loan_state", timeout_s=5))
    with pytest.raises(ValueError, match="does not answer"):
        served_engine.run(host.call("nonsense", timeout_s=5))


def test_the_replica_opens_loans_where_worker_and_scheduler_share_a_process(
    tmp_path: Path,
) -> None:
    start = engine_start(
        str(catalog.resolve("demo", tmp_path)),
        tmp_path,
        worker_cls="loomserve.platform.lending.engine.cpu_worker.RemoteAttentionWorker",
        scheduler_cls="loomserve.platform.lending.engine.scheduler.make_scheduler",
        additional_config={
            ADDITIONAL_CONFIG: {"queue": "fcfs"},
            LENDING_CONFIG: {"borrow_bytes": 64 * EXACT_BLOCK_BYTES},
        },
    )
    with served(start) as engine, connected(engine.address) as client:

        def ask(method: str, *args: object) -> Any:
            (answer,) = engine.run(
                engine.host.collective_rpc(f"loans.{method}", *args, timeout_s=10)
            )
            return answer

        assert BorrowerEngine.model_validate(ask("borrowing"))
        assert ask("lent_state") == []
        with pytest.raises(ValueError, match="there is no call 'nonsense'"):
            ask("nonsense")
        assert len(answers(client, [client.add(PROMPT, max_tokens=8)])[0].tokens) == 8


def test_an_engine_that_cannot_start_says_why_in_a_sentence(tmp_path: Path) -> None:
    model = str(catalog.resolve("demo", tmp_path))
    start = engine_start(model, tmp_path, max_model_len=10**6)
    with pytest.raises(StartError, match=r"cannot start: .*max_model_len") as raised, served(start):
        pass
    assert "\n" not in str(raised.value)


def test_clients_and_the_replica_learn_how_an_engine_ends(
    tmp_path: Path, served_engine: ServedEngine
) -> None:
    model = str(catalog.resolve("demo", tmp_path))
    start = engine_start(model, tmp_path)
    host = served_engine.run(EngineHost.start(start, environment(), 120))
    with connected(start.address) as client:
        endless(client)
        pump_until(lambda: all(each.tokens for each in client.streams.values()), client)
        began = time.monotonic()
        served_engine.run(host.stop(1.4 * PATIENCE_S))
        assert time.monotonic() - began < PATIENCE_S
        pump_until(lambda: client.dead, client, within_s=2)
    assert not host.alive
    assert not list(tmp_path.glob("core-*"))

    host = served_engine.run(EngineHost.start(start, environment(), 120))
    call = host.collective_rpc("check_health", timeout_s=30)
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineEnded, match="SIGKILL"):
        served_engine.run(call)
    assert served_engine.run(host.ended()) == "its process was ended by SIGKILL"
    served_engine.run(host.stop(5))

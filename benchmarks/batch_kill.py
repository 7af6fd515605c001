"""Does every line of a batch get exactly one answer while the batch lane is killed again and again?

A platform of one small model is started, and a batch of ``--lines`` short requests, one in ten of
them bad, is given to it. While it runs, the lane's process gets SIGKILL after random times, until
``--kills`` are done; then the batch ends by itself. Every line must be in the output or the error
file, in the right one, once, and ``request_counts`` must say the same; else the command fails.

With ``--online`` a client asks the same model all the time, as fast as answers come, and its
requests are counted: none may fail. The last line of the output is one JSON object, also written to
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import yaml

from benchmarks.result_files import machine, publish, said_by
from benchmarks.servers import Server

MODEL = "demo"
_BAD_EVERY = 10
_ENDED = {"completed", "failed", "expired", "cancelled"}


class WrongAnswersError(Exception):
    """A line was lost, answered twice, or answered in the wrong file."""


def lines(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests, every tenth of them bad in one of three ways."""
    bad = ({"temperature": "hot"}, {"model": "no-such-model"}, {"max_tokens": 10**6})
    found = []
    for number in range(count):
        body = {"model": MODEL, "prompt": f"Tell me of the number {number}.", "temperature": 0}
        body |= {"max_tokens": max_tokens, "ignore_eos": True}
        if number % _BAD_EVERY == 0:
            body |= bad[number // _BAD_EVERY % len(bad)]
        found.append(
            {"custom_id": f"l-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        )
    return found


def configuration(folder: Path, port: int) -> Path:
    model = {
        "name": MODEL,
        "source": "demo",
        "devices": ["core0"],
        "kv_cache_memory": "256MiB",
        "engine": {"max_model_len": 1024, "max_num_seqs": 32, "block_size": 32,
                   "enforce_eager": True},
    }  # fmt: skip
    config = {
        "devices": [{"name": "core0", "kind": "cpu", "cores": [0]}],
        "models": [model],
        "batch": {"folder": "batch"},
        "server": {"port": port},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def kill_lane(server: Server) -> bool:
    for process in server.members():
        with suppress(psutil.NoSuchProcess):
            if "BatchLane" in "".join(process.cmdline()[:1]):
                process.kill()
                return True
    return False


def kill_again_and_again(
    server: Server, client: openai.OpenAI, batch_id: str, kills: int, source: random.Random
) -> list[int]:
    """How many lines had been answered at each kill."""
    done: list[int] = []
    while len(done) < kills:
        time.sleep(source.uniform(0.5, 15))
        batch = retrieve(client, batch_id)
        if batch is None:
            continue
        if batch.status in _ENDED:
            break
        if kill_lane(server):
            done.append(batch.request_counts.completed + batch.request_counts.failed)
            print(f"killed the lane at {done[-1]} answers ({batch.status})", flush=True)
    return done


def retrieve(client: openai.OpenAI, batch_id: str) -> Any:
    with suppress(openai.InternalServerError):  # the lane is being restarted
        return client.batches.retrieve(batch_id)
    return None


def check(client: openai.OpenAI, batch: Any, given: list[dict[str, Any]]) -> None:
    """
    Raises:
        WrongAnswersError: and how many.
    """
    found = {}
    for kind, file_id in (("good", batch.output_file_id), ("bad", batch.error_file_id)):
        text = client.files.content(file_id).text if file_id else ""
        found[kind] = Counter(json.loads(line)["custom_id"] for line in text.splitlines())
    expected = {
        "bad": {one["custom_id"] for one in given[::_BAD_EVERY]},
        "good": {one["custom_id"] for one in given} - {o["custom_id"] for o in given[::_BAD_EVERY]},
    }
    for kind, wanted in expected.items():
        lost, extra = wanted - found[kind].keys(), found[kind].keys() - wanted
        twice = [name for name, times in found[kind].items() if times > 1]
        if lost or extra or twice:
            raise WrongAnswersError(
                f"{kind} lines: {len(lost)} lost, {len(extra)} in the wrong file, "
                f"{len(twice)} answered twice"
            )
    counts = (batch.request_counts.completed, batch.request_counts.failed)
    if counts != (len(expected["good"]), len(expected["bad"])):
        raise WrongAnswersError(f"request_counts say {counts}")


def ask_online(client: openai.OpenAI, stop: threading.Event, seen: Counter[str]) -> None:
    while not stop.is_set():
        try:
            client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8)
            seen["answered"] += 1
        except openai.OpenAIError as error:
            seen["failed"] += 1
            print(f"an online request failed: {error!r}", flush=True)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [str(Path(sys.executable).parent / "loomserve"), "serve"]
    command.append(str(configuration(folder, options.port)))
    server = Server("loomserve", command, {}, options.port, "/ready", folder / "serve.log")
    server.start()
    try:
        server.wait_ready(options.start_timeout)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{options.port}/v1", api_key="-")
        given = lines(options.lines, options.max_tokens)
        text = "\n".join(map(json.dumps, given)).encode()
        file = client.files.create(file=("in.jsonl", io.BytesIO(text)), purpose="batch")
        began = time.monotonic()
        batch_id = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        ).id
        stop, seen = threading.Event(), Counter[str]()
        online = threading.Thread(target=ask_online, args=(client, stop, seen), daemon=True)
        if options.online:
            online.start()
        source = random.Random(options.seed)
        kills = kill_again_and_again(server, client, batch_id, options.kills, source)
        while (batch := retrieve(client, batch_id)) is None or batch.status not in _ENDED:
            time.sleep(1)
        took = time.monotonic() - began
        stop.set()
        if batch.status != "completed":
            raise WrongAnswersError(f"the batch ended as {batch.status}")
        check(client, batch, given)
        if seen["failed"]:
            raise WrongAnswersError(f"{seen['failed']} online requests failed")
    finally:
        server.stop()
    return {
        "lines": options.lines,
        "max_tokens": options.max_tokens,
        "kills": len(kills),
        "answers_at_kills": kills,
        "answered_once": options.lines,
        "seconds": took,
        "lines_per_s": options.lines / took,
        "online_answered": seen["answered"] if options.online else None,
        "runs": 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--online", action="store_true", help="ask all the time beside it")
    parser.add_argument("--port", type=int, default=18_431)
    parser.add_argument("--seed", type=int, default=1, help="of the times of the kills")
    parser.add_argument("--start-timeout", type=float, default=900)
    options = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        result = run(options, Path(folder))
    publish("batch_kill", result, setup=said_by(options, "port"), facts=facts)


if __name__ == "__main__":
    main()

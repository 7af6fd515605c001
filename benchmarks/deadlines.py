"""What do queues, predicted lengths and refusals gain through the platform, with deadlines?

A platform with one engine on one core serves Alpaca's instructions (``--data``), or drawn ones,
whose answers the model ends by itself (float32, greedy, so an answer is the same in all arms).
First it answers all of them, which tells their lengths, and those of ``--train`` other
instructions, on which ``loomserve lengths train`` makes a predictor. Then, in each run, every arm
gets the same requests: as they come in Azure's conversation trace (``--trace``) or in its likeness,
at ``--load`` times the rate at which they were answered when all were there, with deadlines as in
UELLM, drawn as :mod:`benchmarks.slo` does and sent as ``x-slo-ms``.

Arms are a queue, what is known of lengths, and whether the key has ``refuse_late``. ``known`` is a
predictor that was told the lengths of these very answers. Goodput is requests whose whole answer
came before their deadline for each second from the first arrival to the last end; attainment their
share of all. A request that is refused has missed it. The last line of the output is one JSON
object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import uvloop
import yaml

from benchmarks.load import WORDS
from benchmarks.popularity import client
from benchmarks.report import Spread
from benchmarks.result_files import machine, publish, said_by
from benchmarks.servers import PROGRAMS, Server, ServerFailedError
from benchmarks.slo import Job, Timed, timed
from loomserve.platform.access.keys import new_key
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.features import app
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.predictor import Fitted
from loomserve.platform.lengths.stored import folder_of, remember_embeddings
from loomserve.platform.lengths.training import fit, samples
from loomserve.platform.lengths.training.versions import PredictorVersions, TrainingSet
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.policy.expected import Expected

MODEL = "chat"
PLACES = 16
CONTEXT = 1024
MAX_TOKENS = 256
KV_BYTES = 384 * 2**20
_WARM_UP = 24
_DRAWN = 1000


@dataclass(frozen=True)
class ArmOptions:
    """What an arm's platform is configured with; ``lengths``: predicted, known, or None."""

    queue: str
    lengths: str | None = None
    refuses: bool = False


ARMS = {
    "fcfs": ArmOptions("fcfs"),
    "sjf": ArmOptions("sjf", "predicted"),
    "deadline": ArmOptions("deadline", "predicted"),
    "fcfs_refuses": ArmOptions("fcfs", "predicted", True),
    "deadline_refuses": ArmOptions("deadline", "predicted", True),
    "deadline_refuses_known": ArmOptions("deadline", "known", True),
}


@dataclass(frozen=True)
class Question:
    """An instruction and what it is about, which may be nothing."""

    instruction: str
    about: str

    @property
    def messages(self) -> list[Any]:
        # A predictor takes the system's text for the application's.
        return [
            {"role": "system", "content": self.instruction},
            {"role": "user", "content": self.about or self.instruction},
        ]


@dataclass(frozen=True)
class Answer:
    """Seconds since the request was due; ``first_s`` and ``end_s`` are infinite if refused."""

    tokens: int
    first_s: float
    end_s: float

    @property
    def refused(self) -> bool:
        return self.end_s == float("inf")


@dataclass(frozen=True)
class Served:
    """A load's answers by one arm, in the order of arrival; seconds after the first one's."""

    coming: Sequence[Timed]
    answers: Sequence[Answer]

    def figures(self) -> dict[str, Any]:
        pairs = list(zip(self.coming, self.answers, strict=True))
        met = sum(answer.end_s <= asked.deadline_s for asked, answer in pairs)
        answered = [each for each in self.answers if not each.refused]
        last_s = max(
            asked.at_s + (0.0 if answer.refused else answer.end_s) for asked, answer in pairs
        )
        return {
            "goodput": met / (last_s - self.coming[0].at_s),
            "attainment": met / len(self.answers),
            "refused": len(self.answers) - len(answered),
            "requests": len(self.answers),
            "mean_latency_s": statistics.fmean(each.end_s for each in answered),
        }


def questions(data: Path | None) -> list[Question]:
    """Of which no two have the same instruction, in an order of their own."""
    if data is None:
        return drawn_questions()
    rows = samples.read(data / "alpaca_sample.jsonl.gz", lambda text: len(text.split()))
    found = {row.query.instruction: row.query.user_input for row in rows}
    asked = [Question(*each) for each in found.items() if len(" ".join(each).split()) < 200]
    random.Random("questions").shuffle(asked)
    return asked


def drawn_questions() -> list[Question]:
    """As many short as long ones, about drawn words."""
    source = random.Random("questions")
    words = (", ".join(source.sample(WORDS, 12)) for _ in range(_DRAWN))
    kinds = itertools.cycle(("Name the first of these words", "Write a story about these words"))
    return [Question(f"{kind}: {of}.", "") for kind, of in zip(kinds, words, strict=False)]


def configuration(arm: ArmOptions, predictors: Mapping[str, str], port: int, digest: str) -> Any:
    return {
        "devices": [{"name": "engine", "kind": "cpu", "cores": [0]}],
        "models": [
            {
                "name": MODEL,
                "source": "demo",
                "devices": ["engine"],
                "kv_cache_memory": KV_BYTES,
                "scheduling": {"queue": arm.queue},
                **({"lengths": {"predictor": predictors[arm.lengths]}} if arm.lengths else {}),
                "engine": {
                    "max_model_len": CONTEXT,
                    "max_num_seqs": PLACES,
                    "enforce_eager": True,
                    "dtype": "float32",
                },
            }
        ],
        "server": {
            "host": "127.0.0.1",
            "port": port,
            "api_keys": [{"name": "bench", "hash": digest, "refuse_late": arm.refuses}],
        },
    }


class Platform:
    """Platforms that listen on one port, one after the other, and what clients ask them."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port, self._folder = port, folder
        self._key, self._digest = new_key()
        self._starts = itertools.count()

    @contextlib.contextmanager
    def running(
        self, arm: ArmOptions, predictors: Mapping[str, str], start_timeout: float
    ) -> Iterator[None]:
        """
        Raises:
            ServerFailedError: it did not start within ``start_timeout`` seconds.
        """
        config = self._folder / f"{next(self._starts)}.yaml"
        config.write_text(yaml.safe_dump(configuration(arm, predictors, self._port, self._digest)))
        command = [str(PROGRAMS / "loomserve"), "serve", str(config)]
        server = Server("platform", command, {}, self._port, "/ready", config.with_suffix(".log"))
        try:
            server.start()
            server.wait_ready(start_timeout)
            yield
        finally:
            server.stop()

    def _client(self) -> openai.AsyncOpenAI:
        return client(f"http://127.0.0.1:{self._port}", self._key)

    async def at_once(self, asked: Sequence[Question], streams: int) -> list[Answer]:
        """Answers to all, so many at a time."""
        turn = asyncio.Semaphore(streams)
        async with self._client() as of:

            async def one(question: Question) -> Answer:
                async with turn:
                    return await ask(of, question, time.perf_counter(), None)

            return await asyncio.gather(*map(one, asked))

    async def serve(self, coming: Sequence[Timed], asked: Sequence[Question]) -> Served:
        """Send every request when it is due, whether or not earlier ones have ended."""
        begin = time.perf_counter() - coming[0].at_s
        async with self._client() as of:

            async def one(when: Timed, question: Question) -> Answer:
                due = begin + when.at_s
                await asyncio.sleep(due - time.perf_counter())
                return await ask(of, question, due, when.deadline_s)

            return Served(coming, await asyncio.gather(*map(one, coming, asked)))


async def ask(
    by: openai.AsyncOpenAI, question: Question, due: float, within_s: float | None
) -> Answer:
    """
    Args:
        due: when it should have been sent, on the clock of ``time.perf_counter``.
        within_s: seconds after ``due`` within which its client wants to have the answer, if any.

    Raises:
        openai.OpenAIError: it failed, other than by being refused.
    """
    headers = {}
    if within_s is not None:
        left_s = within_s - (time.perf_counter() - due)
        headers["x-slo-ms"] = str(max(1, round(1000 * left_s)))
    tokens, first_s = 0, 0.0
    try:
        stream = await by.chat.completions.create(
            model=MODEL,
            messages=question.messages,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_headers=headers,
            # Without usage no predictor learns from these answers.
            extra_body={"return_token_ids": True},
        )
        async for chunk in stream:
            first_s = first_s or time.perf_counter() - due
            for choice in chunk.choices:
                tokens += len((choice.model_extra or {}).get("token_ids") or [])
    except openai.RateLimitError as error:
        if getattr(error, "code", None) != "deadline_unreachable":
            raise
        return Answer(0, float("inf"), float("inf"))
    return Answer(tokens, first_s, time.perf_counter() - due)


@contextlib.contextmanager
def predictors(
    taught: Sequence[tuple[Question, int]], known: Sequence[tuple[Question, int]], folder: Path
) -> Iterator[dict[str, str]]:
    """The names of two predictors, until the block ends: of one that learnt from what it was
    ``taught``, by the command that users have, and of one that knows the lengths of ``known``."""
    names = {kind: f"bench-{kind}-{os.getpid()}" for kind in ("predicted", "known")}
    file = folder / "samples.jsonl"
    rows = (
        {"instruction": asked.instruction, "input": asked.messages[1]["content"], "out_tokens": n}
        for asked, n in taught
    )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    try:
        command = [str(PROGRAMS / "loomserve"), "lengths", "train", str(file)]
        subprocess.run([*command, "--name", names["predicted"], "--kind", "uellm"], check=True)
        publish_known(names["known"], known)
        yield names
    finally:
        for name in names.values():
            shutil.rmtree(folder_of(name), ignore_errors=True)


def publish_known(name: str, known: Sequence[tuple[Question, int]]) -> None:
    """A table of the answers' lengths by their instructions."""
    model = catalog.resolve("demo", Path.cwd())
    assert isinstance(model, Path)
    rows = np.array([app(LengthQuery(asked.instruction, "", 0)) for asked, _ in known])
    tokens = np.array([n for _, n in known])
    kind = "mean per app"
    fitted = Fitted(kind, fit.fit(kind, rows, tokens), 0.0, TokenEmbeddings(model).digest)
    training = TrainingSet(rows, tokens, np.ones(len(rows)))
    PredictorVersions(folder_of(name)).publish(fitted, training)
    remember_embeddings(folder_of(name), model)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    platform = Platform(options.port, folder)
    asked = questions(options.data)[: options.requests + options.train]
    served, others = asked[: options.requests], asked[options.requests :]
    with platform.running(ARMS["fcfs"], {}, options.start_timeout):
        learnt = uvloop.run(platform.at_once(others, PLACES))
        begin = time.perf_counter()
        answers = uvloop.run(platform.at_once(served, PLACES))
        rate = options.load * len(served) / (time.perf_counter() - begin)
    longest_s = options.longest * statistics.fmean(each.end_s - each.first_s for each in answers)
    lengths = [each.tokens for each in answers]
    print(
        f"{rate:.2f} requests/s, deadlines up to {longest_s:.1f} s, answers of "
        f"{statistics.fmean(lengths):.0f} tokens",
        flush=True,
    )
    known = list(zip(served, lengths, strict=True))
    taught = [(each, answer.tokens) for each, answer in zip(others, learnt, strict=True)]
    runs: list[dict[str, dict[str, Any]]] = []
    with predictors(taught, known, folder) as names:
        for number in range(options.runs):
            order = list(known)
            random.Random(number).shuffle(order)
            jobs = [Job(1, n, Expected(n, n)) for _, n in order]
            coming = timed(jobs, options.trace, rate, longest_s, str(number))
            turn = number % len(ARMS)
            found = {}
            for name in [*ARMS, *ARMS][turn : turn + len(ARMS)]:
                with platform.running(ARMS[name], names, options.start_timeout):
                    # Until the engine has told how long its requests take, none is refused.
                    uvloop.run(platform.at_once(others[:_WARM_UP], PLACES))
                    of = uvloop.run(platform.serve(coming, [each for each, _ in order]))
                found[name] = of.figures()
                print(f"run {number + 1}/{options.runs}, {name}: {found[name]}", flush=True)
            runs.append({name: found[name] for name in ARMS})
    return {
        **report(runs),
        "rate": rate,
        "longest_deadline_s": longest_s,
        "answer_tokens": statistics.fmean(lengths),
    }


def report(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Each arm over first come, first served, a run; then each run's own figures.

    Raises:
        ValueError: an arm that others are compared with met no deadline at all.
    """

    def over(arm: str, base: str, figure: str) -> dict[str, float]:
        return asdict(Spread.of([run[arm][figure] / run[base][figure] for run in runs]))

    if not all(run[base]["goodput"] for run in runs for base in ("fcfs", "deadline_refuses_known")):
        raise ValueError("no deadline was met: lower --load, or raise --longest")
    return {
        "over_fcfs": {
            arm: {figure: over(arm, "fcfs", figure) for figure in ("goodput", "attainment")}
            for arm in ARMS
            if arm != "fcfs"
        },
        "share_of_known": over("deadline_refuses", "deadline_refuses_known", "goodput"),
        "by_run": list(runs),
        "runs": len(runs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deadlines", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--data", type=Path, help="folder with alpaca_sample.jsonl.gz")
    parser.add_argument("--trace", type=Path, help="an Azure LLM trace of 2023, gzipped CSV")
    parser.add_argument("--requests", type=int, default=160, help="of each run")
    parser.add_argument("--train", type=int, default=300, help="other instructions")
    parser.add_argument("--load", type=float, default=1.6, help="share of the engine's capacity")
    parser.add_argument("--longest", type=float, default=6.0, help="deadline, in mean run times")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--port", type=int, default=18_690)
    parser.add_argument("--start-timeout", type=float, default=600, help="for each platform, s")
    options = parser.parse_args()
    facts = machine()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(options, Path(folder))
    except (ServerFailedError, openai.OpenAIError) as error:
        print(f"deadlines: {error}", file=sys.stderr)
        return 1
    setup = {**said_by(options, "port", "start_timeout"), "places": PLACES}
    publish("deadlines", found, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())

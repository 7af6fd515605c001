"""What do queues, predicted lengths and refusals gain through the platform, with deadlines?

How, and what was found: ``benchmarks/slo.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.harness import (
    NotMeasuredError,
    in_turns,
    over,
    parser_of,
    run,
)
from benchmarks.load import WORDS, Outcome, Request, send_in_streams, send_when_due
from benchmarks.platforms import PROGRAMS, Platform, configuration, served
from benchmarks.workload import azure, azure_like, window
from loomserve.platform.access.keys import new_key
from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
from loomserve.platform.lengths.predict.features import app
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.predictor import Fitted
from loomserve.platform.lengths.stored import folder_of, remember_embeddings
from loomserve.platform.lengths.training import fit, samples
from loomserve.platform.lengths.training.versions import PredictorVersions, TrainingSet
from loomserve.platform.models import catalog

MODEL = "chat"
PLACES = 16
CONTEXT = 1024
MAX_TOKENS = 256
KV_BYTES = 384 * 2**20
PAPER_DEADLINES_S = (1.0, 350.0)
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

    def request(self) -> Request:
        # Without usage no predictor learns from these answers.
        body = {
            "model": MODEL,
            "messages": self.messages,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        return Request("/v1/chat/completions", body, tokens=None, ids=True)


def refused(one: Outcome) -> bool:
    """Whether the platform said that the deadline cannot be met.

    Raises:
        NotMeasuredError: it failed otherwise.
    """
    if one.error is not None and "deadline_unreachable" not in one.error:
        raise NotMeasuredError(one.error)
    return one.error is not None


def figures(asked: Sequence[Request], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A load's answers by one arm, in the order of arrival."""
    answered = [
        (request.at_s, one.last - one.due, request.slo_s or 0.0)
        for request, one in zip(asked, outcomes, strict=True)
        if not refused(one)
    ]
    met = sum(took <= within for _, took, within in answered)
    last_s = max([at + took for at, took, _ in answered] + [one.at_s for one in asked])
    return {
        "goodput": met / (last_s - asked[0].at_s),
        "attainment": met / len(asked),
        "refused": len(asked) - len(answered),
        "requests": len(asked),
        "mean_latency_s": statistics.fmean(took for _, took, _ in answered),
    }


def comes(
    count: int, trace: Path | None, rate: float, longest_s: float, seed: str
) -> list[tuple[float, float]]:
    """When requests come, at a trace's arrival times, and how soon each wants its answer.

    Deadlines are drawn as in UELLM (section 3.6): uniformly at random between 1 and 350 seconds,
    whatever the request, divided by one factor, so that the longest is ``longest_s``.
    """
    source = random.Random(f"deadlines/{seed}")
    arrivals = azure(trace) if trace else azure_like("conversation", requests=2 * count, seed=seed)
    shortest, longest = PAPER_DEADLINES_S
    return [
        (one.at_s, source.uniform(shortest, longest) / longest * longest_s)
        for one in window(arrivals, requests=count, rate=rate, seed=seed)
    ]


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


def configured(
    arm: ArmOptions, predictors: Mapping[str, str], port: int, digest: str
) -> dict[str, Any]:
    engine = {
        "max_model_len": CONTEXT,
        "max_num_seqs": PLACES,
        "enforce_eager": True,
        "dtype": "float32",
    }
    lengths = {"lengths": {"predictor": predictors[arm.lengths]}} if arm.lengths else {}
    queue = {"scheduling": {"queue": arm.queue}}
    of = served(MODEL, "demo", KV_BYTES, engine, devices=["core0"], replicas=1, **queue, **lengths)
    config = configuration(port, of)
    keys = [{"name": "bench", "hash": digest, "refuse_late": arm.refuses}]
    return {**config, "server": {**config["server"], "api_keys": keys}}


class Platforms:
    """Platforms that listen on one port, one after the other, and what a client asks them."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port, self._folder = port, folder
        self._key, self._digest = new_key()
        self._starts = itertools.count()
        self._urls = [f"http://127.0.0.1:{port}"]

    @contextlib.contextmanager
    def running(
        self, arm: ArmOptions, predictors: Mapping[str, str], start_timeout: float
    ) -> Iterator[None]:
        """
        Raises:
            ServerFailedError: it did not start within ``start_timeout`` seconds.
        """
        config = configured(arm, predictors, self._port, self._digest)
        platform = Platform(config, self._folder, f"platform{next(self._starts)}")
        with platform.running(start_timeout):
            yield

    def at_once(self, asked: Sequence[Question]) -> list[Outcome]:
        """Answers to all, as many at a time as the engine has places."""
        requests = [one.request() for one in asked]
        outcomes = uvloop.run(send_in_streams(self._urls, requests, PLACES, self._key))
        for one in outcomes:
            refused(one)
        return outcomes

    def serve(self, asked: Sequence[Request]) -> dict[str, Any]:
        """Send every request when it is due, whether or not earlier ones have ended."""
        return figures(asked, uvloop.run(send_when_due(self._urls, asked, self._key)))


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
    platforms = Platforms(options.port, folder)
    asked = questions(options.data)[: options.requests + options.train]
    served, others = asked[: options.requests], asked[options.requests :]
    with platforms.running(ARMS["fcfs"], {}, options.start_timeout):
        learnt = platforms.at_once(others)
        begin = time.perf_counter()
        answers = platforms.at_once(served)
        rate = options.load * len(served) / (time.perf_counter() - begin)
    longest_s = options.longest * statistics.fmean(one.last - one.times[0] for one in answers)
    lengths = [len(one.ids) for one in answers]
    print(
        f"{rate:.2f} requests/s, deadlines up to {longest_s:.1f} s, answers of "
        f"{statistics.fmean(lengths):.0f} tokens",
        flush=True,
    )
    known = list(zip(served, lengths, strict=True))
    taught = [(each, len(answer.ids)) for each, answer in zip(others, learnt, strict=True)]

    def measure(arm: str, number: int) -> dict[str, Any]:
        order = list(served)
        random.Random(number).shuffle(order)
        due = comes(len(order), options.trace, rate, longest_s, str(number))
        requests = [
            replace(one.request(), at_s=at_s, slo_s=within_s)
            for one, (at_s, within_s) in zip(order, due, strict=True)
        ]
        with platforms.running(ARMS[arm], names, options.start_timeout):
            # Until the engine has told how long its requests take, none is refused.
            platforms.at_once(others[:_WARM_UP])
            return platforms.serve(requests)

    with predictors(taught, known, folder) as names:
        runs = in_turns(list(ARMS), options.runs, measure)
    return {
        **report(runs),
        "rate": rate,
        "longest_deadline_s": longest_s,
        "answer_tokens": statistics.fmean(lengths),
    }


def report(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Each arm over first come, first served, a run; then each run's own figures.

    Raises:
        NotMeasuredError: an arm that others are compared with met no deadline at all.
    """
    if not all(one[base]["goodput"] for one in runs for base in ("fcfs", "deadline_refuses_known")):
        raise NotMeasuredError("no deadline was met: lower --load, or raise --longest")
    return {
        "over_fcfs": {
            arm: {figure: over(runs, arm, "fcfs", figure) for figure in ("goodput", "attainment")}
            for arm in ARMS
            if arm != "fcfs"
        },
        "share_of_known": over(runs, "deadline_refuses", "deadline_refuses_known", "goodput"),
        "by_run": list(runs),
        "runs": len(runs),
    }


def main() -> int:
    parser = parser_of("deadlines", __doc__)
    parser.add_argument("--data", type=Path, help="folder with alpaca_sample.jsonl.gz")
    parser.add_argument("--trace", type=Path, help="an Azure LLM trace of 2023, gzipped CSV")
    parser.add_argument("--requests", type=int, default=160, help="of each run")
    parser.add_argument("--train", type=int, default=300, help="other instructions")
    parser.add_argument("--load", type=float, default=1.6, help="share of the engine's capacity")
    parser.add_argument("--longest", type=float, default=6.0, help="deadline, in mean run times")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--port", type=int, default=18_690)
    parser.add_argument("--start-timeout", type=float, default=600, help="for each platform, s")
    return run(
        "deadlines",
        parser.parse_args(),
        measured,
        without=("port", "start_timeout"),
        places=PLACES,
    )


if __name__ == "__main__":
    sys.exit(main())

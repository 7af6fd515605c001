"""Two mini models on one GPU: a hot one lends some rows' attention to a cold one's stream.

The forms A, B, C and D of the lender are in ``docs/lending_gpus.md``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.model import MiniModel, OwnKv
from benchmarks.gpu.shapes import Loan, llama
from benchmarks.gpu.step import DEVICE, HAS_GPU, Results, captured, main, spread

# isort: split
import torch

from loomserve.platform.lending.cuda.borrowing import HANDED_AT, TAKEN_AT
from loomserve.platform.lending.cuda.buffer import (
    FINISHED_AT,
    NUMBER,
    PICKED_UP_AT,
    TaskShape,
)
from loomserve.platform.lending.cuda.resident import serve_for
from loomserve.platform.lending.ring.words import LINE_WORDS

LAYERS = 8 if HAS_GPU else 2
HOT_ROWS, COLD_ROWS = (128, 64) if HAS_GPU else (3, 1)
CONTEXTS = (1024, 4096) if HAS_GPU else (32,)
LENT = (16, 32, 64) if HAS_GPU else (2,)
"""Rows of the hot model's whose attention is the lender's."""
MOST_ERROR = 3e-2 if HAS_GPU else 1e-5
"""Of the largest number of a step's result, in bfloat16 or float32."""
SAME_STREAM, HIGHEST, POLLS = "A, same stream", "B, highest priority", "C, polls"
RESIDENT = {"D, resident, 16 programs": 16, "D, resident, 64 programs": 64}
RESIDENT_S = 0.02
"""After which the server that stays ends, and the next one of those that are queued begins."""
STEPS = 40
AHEAD = 2
"""Steps that the cold model's thread queues before it waits for the first of them."""


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """A thread that works until the event that it gets is set, at the end of the block."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class HotModel:
    """A decoding step of which some rows' attention is lent."""

    def __init__(self, shape: TaskShape, lent: int, loan: Loan | None) -> None:
        """
        Args:
            shape: of the model and its context.
            lent: the last so many rows.
            loan: of so many rows; None if none are lent.
        """
        self._loan, self._own_rows = loan, HOT_ROWS - lent
        self._model, self._own = MiniModel(shape), OwnKv(shape, self._own_rows)
        self.hidden = torch.randn(HOT_ROWS, shape.query_width, dtype=shape.dtype, device=DEVICE)
        self.result = torch.zeros_like(self.hidden)
        self.stamps = torch.zeros(shape.layers, 4, dtype=torch.int64, device=DEVICE)
        """Of each layer of the last step: posted, picked up, finished, taken, in ns."""

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Compute a step; ``between`` is called when a task is posted."""

        def attend(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            output: torch.Tensor,
        ) -> None:
            own, loan = self._own_rows, self._loan
            if loan is not None:
                loan.borrower.post(layer, query[own:], key[own:], value[own:])
                between()
            self._own.attend(layer, query[:own], key[:own], value[:own], output[:own])
            if loan is not None:
                loan.borrower.wait(output[own:])
                state, done = loan.borrower.state, loan.buffer.done
                stamps = self.stamps[layer]
                stamps[0].copy_(state[HANDED_AT.value])
                stamps[1:3].copy_(done[PICKED_UP_AT.value : FINISHED_AT.value + 1])
                stamps[3].copy_(state[TAKEN_AT.value])

        self.result.copy_(self._model.step(self.hidden, attend))

    def take_over(self, other: HotModel, loan: Loan) -> None:
        """Take another one's weights and rows, with the KV that it lent home."""
        self._model, self.hidden = other._model, other.hidden
        for layer in range(len(self.stamps)):
            for own, theirs, away in zip(
                (self._own.key, self._own.value),
                (other._own.key, other._own.value),
                loan.contiguous(layer),
                strict=True,
            ):
                own[layer] = torch.cat([theirs[layer], away])


class ColdModel:
    """Steps of a model of its own, queued by a thread as fast as they are computed."""

    def __init__(self, shape: TaskShape) -> None:
        self._model, self._own = MiniModel(shape), OwnKv(shape, COLD_ROWS)
        self._hidden = torch.randn(COLD_ROWS, shape.query_width, dtype=shape.dtype, device=DEVICE)
        self.ended_at: list[float] = []

    def step(self, poll: Callable[[], None] = lambda: None) -> None:
        self._model.step(self._hidden, self._own.attend, poll)

    def graph(self, stream: torch.cuda.Stream, poll: Callable[[], None] = lambda: None) -> Any:
        """A step, captured on the stream, with polls that have run before."""
        with torch.cuda.stream(stream):
            self.step()
        return captured(lambda: self.step(poll), stream)

    @contextmanager
    def running(self, graph: Any, stream: torch.cuda.Stream) -> Iterator[None]:
        with beside(lambda stop: self._run(graph, stream, stop)):
            yield

    def step_ms(self) -> dict[str, float]:
        gaps = [
            1000 * (end - begin)
            for begin, end in zip(self.ended_at, self.ended_at[1:], strict=False)
        ]
        return spread(gaps)

    def _run(self, graph: Any, stream: torch.cuda.Stream, stop: threading.Event) -> None:
        self.ended_at, queued = [], []
        with torch.cuda.stream(stream):
            while not stop.is_set():
                graph.replay()
                event = torch.cuda.Event(blocking=True)
                event.record()
                queued.append(event)
                if len(queued) > AHEAD:
                    queued.pop(0).synchronize()
                    self.ended_at.append(time.perf_counter())
        torch.cuda.synchronize()


@contextmanager
def serving(loan: Loan, graph: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """A thread that sees tasks of the loan, and queues the service of each on the stream; none
    without a graph of the service."""
    if graph is None:
        yield
        return
    flag = loan.buffer.posted.numpy()
    first = int(flag[NUMBER.value])
    # Loads what it needs while no kernel spins; there is no task yet.
    graph.replay()
    torch.cuda.synchronize()

    def serve(stop: threading.Event) -> None:
        seen = first
        with torch.cuda.stream(stream):
            while not stop.is_set():
                if (number := int(flag[NUMBER.value])) != seen:
                    seen = number
                    graph.replay()
                else:
                    # Lets the other threads have Python.
                    time.sleep(0)

    with beside(serve):
        yield


@contextmanager
def residing(loan: Loan, programs: int, stream: torch.cuda.Stream) -> Iterator[None]:
    """A thread that keeps the loan's resident server queued on the stream."""

    def stay(stop: threading.Event) -> None:
        queued: list[torch.cuda.Event] = []
        with torch.cuda.stream(stream):
            while not stop.is_set():
                serve_for(loan.lender, RESIDENT_S, programs)
                event = torch.cuda.Event(blocking=True)
                event.record()
                queued.append(event)
                if len(queued) > AHEAD:
                    queued.pop(0).synchronize()

    with torch.cuda.stream(stream):
        # Compiles it, while no kernel waits for a task.
        serve_for(loan.lender, 0, programs)
    stream.synchronize()
    try:
        with beside(stay):
            yield
    finally:
        stream.synchronize()


def hot_step_ms(graph: Any) -> dict[str, float]:
    stream, taken = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for step in range(STEPS + 4):
            begin = time.perf_counter()
            graph.replay()
            stream.synchronize()
            if step >= 4:
                taken.append(1000 * (time.perf_counter() - begin))
    return spread(taken)


def layer_us(stamps: torch.Tensor) -> dict[str, Any]:
    """Of the layers of the last step, in us: until picked up, served, and waited in all."""
    posted, picked, finished, taken = (stamps.cpu()[:, i].double() / 1000 for i in range(4))
    spans = {"until picked up": picked - posted, "served": finished - picked}
    spans["from post to answer"] = taken - posted
    return {name: spread(span.tolist()) for name, span in spans.items()}


def alone(shape: TaskShape, cold: ColdModel, stream: torch.cuda.Stream) -> dict[str, Any]:
    """All rows at home: with the cold model beside it, and without."""
    hot = HotModel(shape, 0, None)
    hot.step()
    graph, cold_graph = captured(hot.step), cold.graph(stream)
    found: dict[str, Any] = {"hot step alone, ms": hot_step_ms(graph)}
    with cold.running(cold_graph, stream):
        found["hot step beside the cold model, ms"] = hot_step_ms(graph)
    found["cold step beside the hot model, ms"] = cold.step_ms()
    with cold.running(cold_graph, stream):
        time.sleep(1)
    found["cold step alone, ms"] = cold.step_ms()
    return found


def lent(
    shape: TaskShape, rows: int, cold: ColdModel, stream: torch.cuda.Stream, form: str
) -> dict[str, Any]:
    """Some rows lent, in one of the forms."""
    of_loan = TaskShape(**{**vars(shape), "max_rows": rows, "max_requests": rows})
    loan = Loan.open(of_loan, torch.zeros(LINE_WORDS, dtype=torch.int64).pin_memory())
    hot = HotModel(shape, rows, loan)
    hot.step(loan.lender.serve)
    torch.cuda.synchronize()
    graph = captured(hot.step)
    polls = form == POLLS
    cold_graph = cold.graph(stream, loan.lender.serve) if polls else cold.graph(stream)
    on = stream if form == SAME_STREAM else torch.cuda.Stream(priority=priorities()[1])
    if form in RESIDENT:
        server = residing(loan, RESIDENT[form], on)
    else:
        server = serving(loan, None if polls else captured(loan.lender.serve, on), on)
    found: dict[str, Any] = {}
    with server, cold.running(cold_graph, stream):
        found["hot step, ms"] = hot_step_ms(graph)
    found["cold step, ms"] = cold.step_ms()
    if polls:
        with cold.running(cold_graph, stream):
            time.sleep(1)
        found["cold step without tasks, ms"] = cold.step_ms()
    found["layers, us"] = layer_us(hot.stamps)
    found["closed"] = int(loan.buffer.closed)
    found["tasks done"] = int(loan.buffer.done[NUMBER.value])
    return found


def priorities() -> tuple[int, int]:
    """The lowest and the highest of streams."""
    lowest, highest = torch.cuda.Stream.priority_range()
    return lowest, highest


def lend(results: Results) -> None:
    checked = check(CONTEXTS[0])
    results.add("check", checked)
    if not HAS_GPU:
        results.end(checked)
        return
    broken = 0
    for context in CONTEXTS:
        shape = llama(LAYERS, HOT_ROWS, context)
        stream, cold = torch.cuda.Stream(priority=priorities()[0]), ColdModel(shape)
        results.add(f"{context} tokens, none lent", alone(shape, cold, stream))
        for rows in LENT:
            for form in (SAME_STREAM, HIGHEST, POLLS, *RESIDENT):
                found = lent(shape, rows, cold, stream, form)
                broken += found["closed"] != 0
                results.add(f"{context} tokens, {rows} of {HOT_ROWS} rows lent, {form}", found)
    results.end(f"{broken} loans were closed" if broken else "no loan was closed")


def check(context: int) -> str:
    """Compare a step whose tasks a cold model's polls serve with one with all rows at home."""
    rows = LENT[0]
    shape = llama(LAYERS, HOT_ROWS, context)
    loan = Loan.open(TaskShape(**{**vars(shape), "max_rows": rows, "max_requests": rows}))
    hot, cold = HotModel(shape, rows, loan), ColdModel(shape)
    hot.step(lambda: cold.step(loan.lender.serve))
    whole = HotModel(shape, 0, None)
    whole.take_over(hot, loan)
    whole.step()
    error = float((hot.result - whole.result).abs().max() / whole.result.abs().max())
    done = int(loan.buffer.done[NUMBER.value])
    if done != LAYERS or not error <= MOST_ERROR:
        raise SystemExit(f"{done} of {LAYERS} tasks were served, with an error of {error:.1e}")
    return f"{done} tasks served, error {error:.1e}"


if __name__ == "__main__":
    main(lend)

"""A borrower's process that writes whatever it likes into the task rings it is given, in turn.

Its first tasks are in order, and half of the others, but of infinities and NaNs. It ends once the
last ring is gone.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import LINE_WORDS, ControlLine, RingTask
from tests.unit.platform.lending.ring.test_hostile import Scribbler

TOKENS = 4
ORDERLY = 20
"""Tasks of each ring that are in order, before it is spoiled."""


def spoil(path: Path, scribbler: Scribbler) -> None:
    while not path.exists():
        time.sleep(0.01)
    ring = Ring.attach(path)
    ring.words[ControlLine.BORROWER * LINE_WORDS] = os.getpid()
    for _ in range(ORDERLY):
        _post_task(ring, scribbler.random)
        until = time.monotonic() + 1
        while _word(ring, ControlLine.DONE) != _word(ring, ControlLine.POSTED):
            if time.monotonic() > until:
                break
            time.sleep(0.0005)
    while path.exists():
        if scribbler.random.random() < 0.5:
            _post_task(ring, scribbler.random)
        else:
            scribbler.anywhere(ring)
        if scribbler.random.random() < 0.3:
            ring.words[ControlLine.CLOSED * LINE_WORDS] = 0
        time.sleep(0.0005)
    ring.close()


def _word(ring: Ring, line: ControlLine) -> int:
    return ring.words[line * LINE_WORDS]


def _post_task(ring: Ring, source: random.Random) -> None:
    areas, size = ring.areas, ring.geometry.block_size
    block = source.randrange(max(1, min(ring.granted, 2**31 - 1)))
    for rows in (areas.query, areas.key, areas.value):
        rows[:TOKENS] = source.choice((float("nan"), float("inf"), 1.0))
    areas.query_start_loc[0], areas.query_start_loc[1] = 0, TOKENS
    areas.seq_lens[0] = TOKENS
    areas.block_table[0, 0] = block
    for token in range(TOKENS):
        areas.slot_mapping[token] = block * size + token
    step, posted = ControlLine.STEP * LINE_WORDS, ControlLine.POSTED * LINE_WORDS
    ring.words[step] = source.randrange(1, 2**40)
    ring.words[step + 1], ring.words[step + 2], ring.words[step + 3] = 1, TOKENS, RingTask.ATTEND
    ring.words[posted + 1] = source.randrange(ring.geometry.layers)
    ring.words[posted] = ring.counter(ControlLine.DONE) + 1


if __name__ == "__main__":
    mine = Scribbler(7)
    print("ready", flush=True)
    for name in sys.argv[1:]:
        spoil(Path(name), mine)

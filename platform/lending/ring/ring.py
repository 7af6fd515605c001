"""The task ring of one borrower and one lender: a file in shared memory that both map.

A *task* is the attention of some rows of the borrower's batch in one layer, or the copy of some
blocks of one layer into the lender's memory or out of it. One is in flight at a time, in lock step
with the borrower's layers, so every area below holds one task::

    page 0          superblock: magic, version, sizes, the borrower's geometry
    page 1          control lines of 128 bytes, in words of 8 bytes (:class:`ControlLine`)
    then, each from a page of its own:
    query_start_loc int32 [max_requests + 1]            a step's metadata, in the loan's own
    seq_lens        int32 [max_requests]                numbering of blocks, from 0
    block_table     int32 [max_requests, max_blocks]
    slot_mapping    int64 [max_tokens]
    query           [max_tokens, query_heads, head_size]   a task's tensors, in the
    key, value      [max_tokens, kv_heads, head_size]      geometry's dtype
    output          [max_tokens, query_heads, head_size]

A step that copies has its blocks' numbers in the first row of ``block_table`` and their bytes, as
they stand in a cache, from the beginning of ``key`` and ``value``.

**Control lines.** Each line has one writing process, and 128 bytes since some machines have such
cache lines and others fetch 64-byte ones in pairs. ``CLOSED`` alone is written by both ends: it
leaves OPEN once and for all, but of two that give up at the same instant either reason may stand.

**Trust.** Each end may write anywhere in the file, so neither believes what it reads here. Numbers
are copied and checked before they are used, a process's own counters are its own and only shown
here, an end that has seen the ring closed does not take it for open again, and what the lender
grants counts as its own two processes know it
(:class:`~loomserve.platform.lending.ring.lent_ring.LentRing`).

**Ordering.** Task n is posted by this chain, each arrow of which is an ordering:

    borrower writes metadata, tensors, layer → stores ``posted = n`` (release)
    → lender loads ``posted = n`` (acquire) → reads them, writes KV and output
    → stores ``done = n`` (release) → borrower loads ``done = n`` (acquire) → reads the output
    → only then writes the tensors of task n + 1, or the metadata of a new step.

So neither end ever writes what the other may still read, and no lock is needed. Counters never
repeat in practice (2^63 tasks), so a late or doubled answer cannot pass for another's. The native
sides use C++ atomics, which are fences on ARM and POWER and plain moves on x86. A GPU's lender
copies blocks in Python, which has no fences: on x86 stores become visible in program order and
loads happen in it (Intel SDM vol. 3, section 9.2; AMD APM vol. 2, section 7.2).

**Memory that is taken back.** A borrower says which blocks it uses (``vacated``) before it uses
more (:meth:`Ring.claim`), and a lender says to what the borrower is to shrink (``wanted``) before
it looks whether it has (:meth:`Ring.recall`). As each writes before it reads, a lender that takes
what it has just granted either sees the claim, and waits, or is seen by who makes it.

**Sleep.** A lender with nothing to do sets ``sleeping``, looks at ``posted`` again and then sleeps
on the futex of its low half, which the kernel compares once more. The borrower stores ``posted``,
passes a full fence and only then reads ``sleeping``. As each writes before it reads (Dekker's
argument), either the lender sees the task or the borrower sees that it must wake it.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import shutil
import struct
import threading
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self

import torch

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.files import replacing
from loomserve.platform.lending.ring.fields import Fields, nbytes_of, views
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.held import hold
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine, RingStats

MAGIC = b"LoomRing"
VERSION = 2

_PAGE = 4096
# So that a counter that somebody spoiled does not outgrow its word.
_MOST_COUNTED = 2**62 - 1
_SUPERBLOCK = struct.Struct("<8sQQQQQQ")
_BARRIER = threading.Lock()


class Areas(NamedTuple):
    """A ring's tensors, of the shapes and types above; ``control`` is int64 [lines, words]."""

    control: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


def _fence() -> None:
    """Have all that was written be seen by the other end before anything is read from now on."""
    # To take a lock is an atomic exchange, before which x86 empties its store buffer.
    with _BARRIER:
        pass


class Ring:
    """One ring as one process maps it. Workers post and serve through their
    :class:`~loomserve.platform.lending.ring.borrower.Borrower` and
    :class:`~loomserve.platform.lending.ring.attention_server.AttentionServer`; schedulers map the
    ring for its control words."""

    areas: Areas
    """Gone after :meth:`close`."""

    def __init__(self, path: Path, file: FileIO) -> None:
        """Map an open ring; ``StartError`` if the file is none, or another version's, or cut."""
        self.path = path
        superblock = _superblock(path, file)
        hold(file)
        self.geometry = superblock.geometry
        self.max_tokens = superblock.max_tokens
        self.max_requests = superblock.max_requests
        self.max_blocks = superblock.max_blocks
        self._mapping = mmap.mmap(file.fileno(), superblock.nbytes)
        lines = memoryview(self._mapping)[_PAGE : _PAGE + len(ControlLine) * LINE_WORDS * 8]
        self.words = lines.cast("q")
        self._closed = Closed.OPEN
        memory = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=_PAGE)
        self.areas = Areas(**views(superblock.areas(), memory, _PAGE))

    @classmethod
    def create(
        cls, path: Path, geometry: Geometry, max_tokens: int, max_requests: int, max_blocks: int
    ) -> Self:
        """Make a ring for steps of up to ``max_tokens``, and requests of up to ``max_blocks`` each.
        A ring already at ``path`` is replaced; who has it mapped keeps the old one. ``StartError``
        if there is too little shared memory."""
        superblock = _Superblock(geometry, max_tokens, max_requests, max_blocks)
        # Nobody may attach to what is not complete, or read it: it carries users' prompts.
        with (
            replacing(path) as new,
            FileIO(new, "x+", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
        ):
            _reserve(path, file, superblock.nbytes)
            os.pwrite(file.fileno(), superblock.pack(), 0)
            return cls(path, file)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Map the ring at ``path``; ``StartError`` if there is none that this version can use."""
        try:
            file = FileIO(path, "r+")
        except OSError as error:
            raise StartError(f"cannot open the task ring {path}: {error.strerror}") from error
        with file:
            return cls(path, file)

    def close(self) -> None:
        """Drop this process's mapping, which ends with its last view; the ring stays open."""
        self.words.release()
        self.__dict__.pop("areas", None)

    def unlink(self) -> None:
        """Remove the file; who has it mapped keeps it."""
        self.path.unlink(missing_ok=True)

    @property
    def granted(self) -> int:
        """Blocks of the loan that the borrower may use now; the lender's scheduler writes it."""
        return max(0, self.words[ControlLine.GRANTED * LINE_WORDS])

    @granted.setter
    def granted(self, blocks: int) -> None:
        self.words[ControlLine.GRANTED * LINE_WORDS] = blocks

    @property
    def wanted(self) -> int:
        """Blocks to which the borrower is to shrink; the lender's scheduler writes it."""
        return max(0, self.words[ControlLine.WANTED * LINE_WORDS])

    @wanted.setter
    def wanted(self, blocks: int) -> None:
        self.words[ControlLine.WANTED * LINE_WORDS] = blocks

    @property
    def vacated(self) -> int:
        """The first block from which on the borrower uses none; its scheduler writes it."""
        return self.words[ControlLine.VACATED * LINE_WORDS]

    @vacated.setter
    def vacated(self, blocks: int) -> None:
        self.words[ControlLine.VACATED * LINE_WORDS] = blocks

    def claim(self) -> int:
        """Return how many blocks the borrower may use until the next claim; the lender knows. Who
        may use fewer than before leaves them, and then writes ``vacated``."""
        blocks = min(self.granted, self.wanted)
        if blocks > self.vacated:
            self.vacated = blocks
        _fence()
        # In this order: a lender grants after it has said that it wants no more back.
        wanted = self.wanted
        return min(blocks, wanted, self.granted)

    def recall(self, kept: int) -> bool:
        """Want all blocks back but the first ``kept``; returns whether the borrower uses none."""
        self.wanted = kept
        _fence()
        return self.vacated <= kept

    @property
    def closed(self) -> Closed:
        """Why the ring is closed; once it was seen so, the other end cannot open it again."""
        word = self.words[ControlLine.CLOSED * LINE_WORDS]
        if self._closed is Closed.OPEN:
            self._closed = Closed(word)
        elif word == Closed.OPEN:
            # Other processes of this end must see it, too.
            self.words[ControlLine.CLOSED * LINE_WORDS] = self._closed
        return self._closed

    def shut(self, reason: Closed) -> None:
        """Close the ring for both ends, for good; does nothing if it is closed already."""
        if self.closed is Closed.OPEN:
            self.words[ControlLine.CLOSED * LINE_WORDS] = self._closed = reason

    def pid(self, end: ControlLine) -> int:
        """Return the process id of the worker at BORROWER or LENDER; 0 while it is not there."""
        return self.words[end * LINE_WORDS]

    def stats(self) -> RingStats:
        borrower, lender = (
            ControlLine.BORROWER_STATS * LINE_WORDS,
            ControlLine.LENDER_STATS * LINE_WORDS,
        )
        return RingStats(*self.words[borrower : borrower + 4], *self.words[lender : lender + 4])

    def counter(self, line: ControlLine) -> int:
        """Return the first word of a line of which the caller counts on by itself."""
        return self.words[line * LINE_WORDS] & _MOST_COUNTED

    def count(self, figure: int, amount: int) -> None:
        """Add to one of the borrower's counters, which it writes, to what stands there."""
        at = ControlLine.BORROWER_STATS * LINE_WORDS + figure
        self.words[at] = (self.words[at] + amount) & _MOST_COUNTED

    @property
    def most_copied(self) -> int:
        return min(self.max_tokens // self.geometry.block_size, self.max_blocks)

    def copied(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a copying task's blocks, as views of a cache's shape:
        [blocks, kv_heads, block_size, head_size]."""
        geometry = self.geometry
        shape = (blocks, geometry.kv_heads, geometry.block_size, geometry.head_size)
        key, value = (
            area[: blocks * geometry.block_size].view(shape)
            for area in (self.areas.key, self.areas.value)
        )
        return key, value


class RingPeer:
    """The worker at the other end of a ring; both share a PID namespace."""

    def __init__(self, ring: Ring, end: ControlLine) -> None:
        self._ring = ring
        self._end = end
        self._process: FileIO | None = None
        self._gone = False

    def meet(self) -> None:
        """Open the process soon after it came, before its pid can mean another one. What is no pid
        counts as a process that is gone."""
        pid = self._ring.words[self._end * LINE_WORDS]
        if pid and self._process is None and not self._gone:
            try:
                self._process = FileIO(os.pidfd_open(pid))
            except (ProcessLookupError, OverflowError):
                self._gone = True
            except OSError as error:
                # A process that may open no more files looks again.
                self._gone = error.errno == errno.EINVAL

    def gone(self) -> bool:
        """Whether its process has ended, reaped or not."""
        self.meet()
        if self._process is not None:
            ended = select.poll()
            ended.register(self._process, select.POLLIN)
            self._gone = bool(ended.poll(0))
        return self._gone


class _Superblock(NamedTuple):
    geometry: Geometry
    max_tokens: int
    max_requests: int
    max_blocks: int

    def areas(self) -> Fields:
        """Type and shape of the areas, which begin behind the first page."""
        geometry, tokens, requests = self.geometry, self.max_tokens, self.max_requests
        dtype: torch.dtype = getattr(torch, geometry.dtype)
        queries = (dtype, (tokens, geometry.query_heads, geometry.head_size))
        keys = (dtype, (tokens, geometry.kv_heads, geometry.head_size))
        return {
            "control": (torch.int64, (len(ControlLine), LINE_WORDS)),
            "query_start_loc": (torch.int32, (requests + 1,)),
            "seq_lens": (torch.int32, (requests,)),
            "block_table": (torch.int32, (requests, self.max_blocks)),
            "slot_mapping": (torch.int64, (tokens,)),
            "query": queries,
            "key": keys,
            "value": keys,
            "output": queries,
        }

    @property
    def nbytes(self) -> int:
        return _PAGE + nbytes_of(self.areas(), _PAGE)

    def pack(self) -> bytes:
        text = self.geometry.to_json().encode()
        sizes = (self.max_tokens, self.max_requests, self.max_blocks)
        return _SUPERBLOCK.pack(MAGIC, VERSION, self.nbytes, *sizes, len(text)) + text


def _superblock(path: Path, file: FileIO) -> _Superblock:
    page = os.pread(file.fileno(), _PAGE, 0)
    if len(page) < _PAGE or not page.startswith(MAGIC):
        raise StartError(f"{path} is no task ring: remove it or name another path")
    _, version, nbytes, tokens, requests, blocks, length = _SUPERBLOCK.unpack_from(page)
    if version != VERSION:
        raise StartError(
            f"the task ring {path} has format {version}, this Loomserve reads {VERSION}: "
            "run the same Loomserve at both ends"
        )
    text = page[_SUPERBLOCK.size : _SUPERBLOCK.size + length]
    superblock = _Superblock(Geometry.from_json(text), tokens, requests, blocks)
    if os.fstat(file.fileno()).st_size != nbytes or superblock.nbytes != nbytes:
        raise StartError(f"the task ring {path} is cut short: remove it")
    return superblock


def _reserve(path: Path, file: FileIO, size: int) -> None:
    """Back the file with memory now, as a store to a page that cannot be had is a SIGBUS."""
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise StartError(
            f"the task ring {path} needs {size} bytes, of which {path.parent} has {free} free: "
            "lower max_num_batched_tokens or max_num_seqs of its model"
        )
    os.posix_fallocate(file.fileno(), 0, size)

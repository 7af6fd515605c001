"""Writes the output and error files of a batch from its lines."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import BinaryIO

from loomserve.platform.batch.answers import unanswered
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.policy.objects import OUTPUT, BatchRecord, FileRecord, new_id
from loomserve.platform.batch.policy.status import BatchStatus
from loomserve.platform.batch.store.store import BatchStore


def end(
    store: BatchStore, folder: BatchFolder, batch: BatchRecord, retention_s: float, now: float
) -> BatchRecord:
    """End a batch that is finalizing or cancelling; repeating it after a crash is safe.

    One transaction makes both files known, once they are whole and in their places.
    """
    ending = batch.ending or BatchStatus.CANCELLED
    ids = {True: new_id("file-"), False: new_id("file-")}
    with ExitStack() as opened:
        streams = {ok: opened.enter_context(folder.incoming(ids[ok]).open("wb")) for ok in ids}
        for custom_id, ok, answer in store.lines.answers(batch.id):
            streams[ok].write((answer or unanswered(custom_id, ending)) + b"\n")
        sizes = {ok: _synced(stream) for ok, stream in streams.items()}
    expires_at = int(now + (batch.output_expires_s or retention_s))
    records: dict[bool, FileRecord | None] = {}
    for ok, kind in ((True, "output"), (False, "error")):
        records[ok] = None
        if not sizes[ok]:
            folder.incoming(ids[ok]).unlink()
            continue
        folder.publish(ids[ok])
        records[ok] = FileRecord(
            id=ids[ok],
            owner=batch.owner,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=OUTPUT,
            bytes=sizes[ok],
            created_at=int(now),
            expires_at=expires_at,
        )
    return store.batches.finish(batch.id, records[True], records[False], now)


def _synced(stream: BinaryIO) -> int:
    stream.flush()
    os.fsync(stream.fileno())
    return stream.tell()

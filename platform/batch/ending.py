"""Writes the output and error files of a batch from its lines, as OpenAI writes them."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from typing import Any, BinaryIO

from loomserve.platform.base.errors import TakenOver
from loomserve.platform.batch.executor import LineAnswer
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.policy.objects import (
    OUTPUT,
    BatchRecord,
    BatchStatus,
    FileRecord,
    new_id,
)
from loomserve.platform.batch.store.lines import StoredAnswer
from loomserve.platform.batch.store.store import BatchStore

_UNANSWERED = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.FAILED: (
        "batch_failed",
        "This request was not executed because the batch failed; see the batch's errors.",
    ),
    BatchStatus.CANCELLED: (
        "batch_cancelled",
        "This request was not executed before the batch was cancelled.",
    ),
}


def answered(
    batch_id: str, number: int, custom_id: str, request_id: str, said: LineAnswer
) -> StoredAnswer:
    """The answer of an engine or the platform, as a line of the output or error file."""
    body = _parsed(said)
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    response = {"status_code": said.status, "request_id": request_id, "body": body}
    return StoredAnswer(
        batch_id=batch_id,
        number=number,
        ok=said.status == 200,
        text=_line(custom_id, response, None),
        input_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else 0),
        output_tokens=_count(usage.get("completion_tokens")),
    )


def unanswered(custom_id: str, ending: BatchStatus) -> bytes:
    """The line of the error file for a request that had no answer when its batch ended."""
    code, message = _UNANSWERED[ending]
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _parsed(said: LineAnswer) -> dict[str, Any]:
    try:
        body = json.loads(said.body)
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    message = f"the engine answered with something that is not JSON ({said.status})"
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


_KINDS = {True: "output", False: "error"}


def end(
    store: BatchStore, folder: BatchFolder, batch: BatchRecord, retention_s: float, now: float
) -> BatchRecord:
    """End a batch that is finalizing or cancelling; repeating it after a crash is safe, and so is
    another lane that takes over meanwhile: each has files of its own. One transaction makes both
    files known, once they are whole and in their places. What fails before, a full disk most of
    all, leaves neither behind."""
    ids = {ok: _file_id(batch.id, kind, store.generation) for ok, kind in _KINDS.items()}
    try:
        sizes = _write(store, folder, batch, ids)
        expires_at = int(now + (batch.output_expires_s or retention_s))
        records: dict[bool, FileRecord | None] = {}
        for ok, kind in _KINDS.items():
            records[ok] = None
            if not sizes[ok]:
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
    except BaseException:
        for file_id in ids.values():
            folder.remove(file_id)
        raise
    finally:
        for file_id in ids.values():
            folder.incoming(file_id).unlink(missing_ok=True)
    try:
        return store.batches.finish(batch.id, records[True], records[False], now)
    except TakenOver:
        for file_id in ids.values():
            folder.remove(file_id)
        raise


def _write(
    store: BatchStore, folder: BatchFolder, batch: BatchRecord, ids: dict[bool, str]
) -> dict[bool, int]:
    """Write both files under ``incoming``, and return their sizes in bytes."""
    status = batch.ending or BatchStatus.CANCELLED
    with ExitStack() as opened:
        streams = {ok: opened.enter_context(folder.incoming(ids[ok]).open("wb")) for ok in ids}
        for custom_id, ok, answer in store.lines.answers(batch.id):
            streams[ok].write((answer or unanswered(custom_id, status)) + b"\n")
        return {ok: _synced(stream) for ok, stream in streams.items()}


def _synced(stream: BinaryIO) -> int:
    stream.flush()
    os.fsync(stream.fileno())
    return stream.tell()


def _file_id(batch_id: str, kind: str, generation: int) -> str:
    """Id of a batch's file: a lane's always the same, and guessed by nobody, as the batch's is not.
    A lane of an earlier generation that goes on beside its successor writes and removes others."""
    name = f"{batch_id} {kind} {generation}"
    return "file-" + hashlib.sha256(name.encode()).hexdigest()[:32]

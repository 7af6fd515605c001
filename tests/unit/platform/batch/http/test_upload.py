"""Uploads that are not meant well are refused soon, and cheaply."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from collections.abc import AsyncIterator, Iterable

import pytest

from loomserve.platform.base.errors import BadRequest, RequestError, RequestTimeout
from loomserve.platform.batch.http import upload as upload_module
from loomserve.platform.batch.http.upload import Upload, paced
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio
FORM = "multipart/form-data; boundary=b"
FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'
END = b"--b--\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Target(io.BytesIO):
    """A file that needs no disk."""

    def fileno(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module.os, "fsync", lambda _: None)


async def stream(chunks: Iterable[bytes], pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for chunk in chunks:
        await asyncio.sleep(pause_s)
        yield chunk


async def read(chunks: Iterable[bytes], content_type: str = FORM, pause_s: float = 0.0) -> Upload:
    upload = Upload(Target(), 200 * 2**20)
    await upload.read(content_type, paced(stream(chunks, pause_s)))
    return upload


def part(name: str) -> bytes:
    return b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\nx\r\n' % name.encode()


def headers(count: int) -> bytes:
    return b"".join(b"x-%d: y\r\n" % n for n in range(count))


@pytest.mark.parametrize(
    ("chunks", "content_type", "message"),
    [
        # 200 MiB of parts of twelve bytes, without end.
        (itertools.repeat(b"--b\r\n\r\n\r\nx\r\n" * 5000, 3500), FORM, "more than 32 parts"),
        (itertools.repeat(part("same") * 1000, 3500), FORM, "more than 32 parts"),
        ([*map(part, map(str, range(32))), FILE, END], FORM, "more than 32 parts"),
        ([FILE, FILE, END], FORM, "more than one file"),
        ([b"--b\r\n", headers(9), b"\r\nx\r\n", END], FORM, "header count exceeded"),
        ([b"--b\r\n", *itertools.repeat(b"x-y: z\r\n", 100_000)], FORM, "header count exceeded"),
        ([FILE, END], f"multipart/form-data; boundary={'b' * 1024}", "more than 70 characters"),
        ([FILE], FORM, "ends in its midst"),
    ],
)
async def test_a_form_that_no_client_sends_is_refused_at_once(
    chunks: Iterable[bytes], content_type: str, message: str
) -> None:
    began = time.process_time()
    with pytest.raises(BadRequest, match=message):
        await read(chunks, content_type)
    assert time.process_time() - began < 1


async def test_a_form_with_as_much_as_is_allowed_is_read() -> None:
    names = [f"n{number}" for number in range(31)]
    upload = await read([*map(part, names), FILE, END])
    assert (sorted(upload.fields), upload.size) == (sorted(names), 2)
    head = FILE.replace(b"\r\n\r\n", b"\r\n" + headers(7) + b"\r\n")
    assert (await read([head, END])).size == 2


@pytest.mark.parametrize("pause_s", [0.02, 3 * PATIENCE_S])
async def test_an_upload_that_hardly_comes_is_given_up(
    monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    assert upload_module._PACE_S <= 9
    monkeypatch.setattr(upload_module, "_PACE_S", 0.3)
    endless = itertools.chain([FILE[:-4]], itertools.repeat(b"x"))
    began = time.monotonic(), time.process_time()
    with pytest.raises(RequestTimeout, match="Send it faster"):
        await read(endless, pause_s=pause_s)
    assert time.monotonic() - began[0] < PATIENCE_S
    assert time.process_time() - began[1] < 0.5


async def test_an_upload_at_an_old_modems_pace_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # It is eight times as fast as it must be, as other tests may have the core.
    monkeypatch.setattr(upload_module, "_PACE_S", 1.0)
    monkeypatch.setattr(upload_module, "_PACE_BYTES", 300)
    upload = await read([FILE[:-4], *[b"x" * 50] * 80, b"\r\n", END], pause_s=0.02)
    assert upload.size == 4000


async def test_random_bytes_are_refused_and_nothing_else_happens() -> None:
    for seed in range(50):
        body = bytes((seed * 31 + n * n) % 256 for n in range(500))
        with pytest.raises(RequestError):
            await read([b"--b\r\n" + body])

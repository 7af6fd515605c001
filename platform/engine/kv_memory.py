"""KV memory of an engine on a CPU that has the machine's memory once the engine has started.

vLLM writes zeros to its whole KV cache as it starts, for which a GiB takes a second or two. Pages
that nobody has touched read as zeros, too, so requests need not wait for that: they take memory
with the first write to each, and a thread takes the rest of it beside them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_logger = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_POPULATE_WRITE = 23
"""Linux 5.14 and later: pages are there as after a write, and hold what they held."""
_AT_ONCE = 2**21
_LEAST_PRIORITY = 19
FIRST_REQUESTS_S = 2.0
"""Before them a thread that takes memory would keep the core from whoever waits for the engine."""


class UntouchedKv(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered ``torch.zeros`` on a CPU gives bytes that have taken no memory yet."""

    memory: mmap.mmap | None = None
    """The last it has given; all of its pages are its own."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        of_bytes = given.get("dtype") is torch.int8 and given.get("device") == torch.device("cpu")
        if function is not torch.zeros or not of_bytes or not (args and isinstance(args[0], int)):
            return function(*args, **given)
        self.memory = mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(self.memory, dtype=torch.int8)


class KvFilling:
    """Takes an engine's KV memory page by page, in a thread that gives way to all others.

    What an engine was measured to have then counts its KV memory, whether or not it is used; and
    it lies in huge pages, as far as the machine has them.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self.end()
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="KV memory", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take no more, and until it begins again small pages."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._advise(mmap.MADV_NOHUGEPAGE, 0, len(self._memory))

    def _run(self) -> None:
        if self._ended.wait(FIRST_REQUESTS_S):
            return
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        size = len(self._memory)
        self._advise(mmap.MADV_HUGEPAGE, 0, size)
        for begin in range(0, size, _AT_ONCE):
            if self._ended.is_set():
                return
            if error := self._advise(_POPULATE_WRITE, begin, min(_AT_ONCE, size - begin)):
                # It comes with the first writes then.
                _logger.debug("KV memory is not taken beforehand: %s", os.strerror(error))
                return

    def _advise(self, advice: int, begin: int, size: int) -> int:
        """The error's number; 0: there is none."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return ctypes.get_errno() if _LIBC.madvise(address + begin, size, advice) else 0

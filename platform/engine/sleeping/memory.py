"""Pages of a CPU engine's memory, given back to the operating system without freeing the tensors.

Anonymous pages that are given back read as zeros, as they did when they were allocated, and take
memory again with the first write to each. So nothing has to be allocated or bound anew.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def give_back_pages(caches: Iterable[Any]) -> int:
    """Give back the pages of KV caches, all of which are zero from now on.

    A page that holds anything else, too, stays.

    Args:
        caches: tensors on a CPU, or lists of such; several may share one allocation.

    Returns:
        Bytes of the pages, whether or not they took memory.

    Raises:
        OSError: the operating system refuses.
    """
    storages = {each.untyped_storage().data_ptr(): each for each in _tensors(caches)}
    given = 0
    for begin, tensor in storages.items():
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (begin + tensor.untyped_storage().nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            if _LIBC.madvise(first, end - first, mmap.MADV_DONTNEED):
                error = ctypes.get_errno()
                raise OSError(error, "KV memory cannot be given back")
            given += end - first
    return given


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)

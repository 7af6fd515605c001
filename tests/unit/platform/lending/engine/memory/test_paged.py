"""KV memory by the page, on pages of the host."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu.host_memory import HostPages
from loomserve.platform.lending.engine.memory.paged import PagedMemory

PAGE = mmap.PAGESIZE


def bytes_of(pages: int) -> tuple[PagedMemory, torch.Tensor]:
    memory = PagedMemory(pages * PAGE, HostPages())
    return memory, memory.tensor(torch.empty(pages * PAGE, dtype=torch.int8, device="meta"))


def test_what_is_backed_can_be_used_and_keeps_what_it_holds() -> None:
    memory, whole = bytes_of(5)
    # Parts of three pages; what one of them had already is not mapped anew.
    memory.back(whole[2 * PAGE : 3 * PAGE])
    whole[2 * PAGE : 3 * PAGE] = 7
    memory.back(whole[PAGE + 5 : 3 * PAGE + 1])
    assert memory.nbytes == 3 * PAGE
    assert (whole[2 * PAGE : 3 * PAGE] == 7).all()
    whole[PAGE : 4 * PAGE] = 3
    # Only the middle one is released as a whole.
    memory.release(whole[PAGE + 5 : 3 * PAGE + 1])
    assert (whole[PAGE : 2 * PAGE] == 3).all()
    assert (whole[3 * PAGE : 4 * PAGE] == 3).all()
    # Its memory is kept for others.
    assert memory.nbytes == 3 * PAGE
    memory.back(whole[2 * PAGE :])
    whole[2 * PAGE :] = 1
    memory.release(whole)
    memory.release(whole)
    assert memory.nbytes == 4 * PAGE


@pytest.mark.parametrize("released", [False, True])
def test_pages_of_the_host_that_are_not_mapped_cannot_be_used(released: bool) -> None:
    uses = f"""
import torch
from tests.unit.platform.lending.engine.memory.test_paged import PAGE, bytes_of
memory, whole = bytes_of(3)
memory.back(whole[PAGE:] if {released} else whole[:PAGE])
print(int(whole[PAGE if {released} else 0]), flush=True)
if {released}:
    memory.release(whole[PAGE : 2 * PAGE])
print(int(whole[PAGE]))
"""
    done = subprocess.run([sys.executable, "-c", uses], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0\n", -11)


def test_a_page_is_a_number_of_the_hosts() -> None:
    with pytest.raises(ValueError, match=f"is not a number of {PAGE}"):
        HostPages(PAGE + 1)

"""What a CPU says of itself, and what torch says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loomserve.platform.devices import machine


def test_it_is_torchs_own_word_for_this_machine() -> None:
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert machine.cpu_dtype() == ("auto" if native else "float32")


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t: x\n", "float32"),
        ("flags : avx512f avx512dq avx512bw avx512vl avx2\n", "auto"),
        ("flags : avx512f avx512dq\n", "float32"),
        ("processor : 0\nFeatures : fp asimd bf16 i8mm\n", "auto"),
        ("Features : fp asimd\n", "float32"),
        ("processor : 0\n", "float32"),
    ],
)
def test_what_a_cpu_says_of_itself(
    cpuinfo: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine.cpu_dtype() == dtype

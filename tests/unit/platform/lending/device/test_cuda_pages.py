"""Calls of CUDA's driver on virtual memory: without a GPU, with the package that reaches it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda_wheels


def test_pages_are_made_mapped_unmapped_and_given_back(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="CUDA's wheels are not installed")
    compiler = shutil.which("gcc") or pytest.skip("there is no gcc to build a stub of the driver")
    source = Path(__file__).with_name("driver.c")
    to = ["-o", str(tmp_path / "libcuda.so.1"), "-Wl,-soname,libcuda.so.1", "-ldl"]
    subprocess.run([compiler, "-shared", "-fPIC", str(source), *to], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.platform.lending.device.cuda_pages"],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "all is well\n", done.stderr

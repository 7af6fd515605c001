"""The image for CPUs, built where no registry is reached, and run as pods run it.

``IMAGE_OPTIONS`` are more options of its build, such as secrets for a mirror of packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/loomserve:test"
BUILD_S, OTHER_S = 3000, 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S + 2 * OTHER_S)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here (Debian: apt-get install {tool})")
    if os.geteuid() != 0:
        pytest.skip("a root file system is made by root")
    return {
        **os.environ,
        "IMAGE": IMAGE,
        "IMAGE_TOOL": "buildah",
        "IMAGE_BASE": "localhost/debian:bookworm",
        "IMAGE_OPTIONS": f"--isolation=chroot {os.environ.get('IMAGE_OPTIONS', '')}",
    }


def make(target: str, environment: dict[str, str], timeout_s: float) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", target],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    make("image-base", environment, OTHER_S)
    print(make("image", environment, BUILD_S))
    yield environment
    subprocess.run(["buildah", "rmi", IMAGE], check=False, capture_output=True)


def test_it_answers_as_its_own_user_on_a_root_that_cannot_be_written(built: dict[str, str]) -> None:
    said = make("check-image", built, OTHER_S)
    print(said)
    assert "it serves examples/laptop.yaml" in said
    assert "failed" not in said

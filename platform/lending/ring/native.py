"""The native extension with the ring's hot path: built once a machine, then loaded.

It lies in ``native`` under Loomserve's cache folder, by a hash of all that it depends on. ``python
-m loomserve.platform.lending.ring.native`` builds it; else its first user does. An environment that
many machines have, such as a container image's, brings it along under ``share/loomserve``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.lending.ring.ring import Ring

SOURCE = Path(__file__).with_name("ring.cpp")
NAME = "loomserve_ring"
FLAGS = ("-O3", "-std=c++20", "-fopenmp", "-Wall")


@functools.cache
def extension() -> Any:
    """Return the extension, loaded once; ``StartError`` as of :func:`load`."""
    return load()


def load() -> Any:
    """Return the extension; the first process that needs it builds it. ``StartError`` if it cannot
    be built; the message says what to install."""
    path = target()
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name("lock")):
                if not path.exists():
                    _build(path)
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror}") from error
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def target() -> Path:
    parts = (
        SOURCE.read_bytes(),
        torch.__version__.encode(),
        str(sysconfig.get_config_var("SOABI")).encode(),
        " ".join(FLAGS).encode(),
    )
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    below = Path("native", key, f"{NAME}.so")
    brought = Path(sys.prefix, "share/loomserve") / below
    return brought if brought.exists() else cache_folder() / below


def mapped(ring: Ring) -> Any:
    """Return the extension's view of the ring, which keeps the mapping."""
    return extension().Ring(*ring.areas)


def _build(path: Path) -> None:
    # Its import inspects compilers and environment, which only a build needs.
    from torch.utils import cpp_extension

    folder = path.with_name("build")
    # A build that was killed leaves a lock of its own behind, on which the next would wait.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        with _own_tools_found():
            # Not imported from there, since it is imported from where it then lies.
            cpp_extension.load(
                NAME,
                [str(SOURCE)],
                extra_cflags=list(FLAGS),
                extra_ldflags=["-fopenmp"],
                build_directory=str(folder),
                is_python_module=False,
            )
    except Exception as error:
        raise StartError(
            "the task ring cannot be compiled: install a C++20 compiler (Debian, Ubuntu: apt "
            "install g++), ninja and Python's headers; "
            "`python -m loomserve.platform.lending.ring.native` shows what went wrong"
        ) from error
    (folder / f"{NAME}.so").rename(path)
    shutil.rmtree(folder)


@contextmanager
def _own_tools_found() -> Iterator[None]:
    """Put the ninja of Loomserve's environment on the PATH, as the environment may be inactive."""
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), path))
    try:
        yield
    finally:
        os.environ["PATH"] = path


if __name__ == "__main__":
    try:
        load()
    except StartError as failure:
        sys.exit(f"{failure.__cause__}\nerror: {failure}")
    print(target())

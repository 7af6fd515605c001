"""torch's process groups of an engine that is one process, without TCP ports.

vLLM makes a dozen groups for every engine, and Gloo listens on a port of loopback for each. It asks
who connects for no secret, so any user of the machine could take the engine's descriptors. A group
of one process sends nothing: torch's backend ``fake``, which never does, answers as Gloo would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

_MAKERS = ("init_process_group", "new_group")


def groups_without_ports(world_size: int) -> AbstractContextManager[None]:
    """Within it the groups of ``world_size`` processes are made; of one, they open no ports."""
    return _fake_for_gloo() if world_size == 1 else nullcontext()


@contextmanager
def _fake_for_gloo() -> Iterator[None]:
    # To import it registers the backend.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    makers = {name: getattr(dist, name) for name in _MAKERS}
    for name, make in makers.items():
        setattr(dist, name, _with_fake(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(dist, name, make)


def _with_fake(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        backend = dist.Backend.FAKE if backend == dist.Backend.GLOO else backend
        return make(*args, backend=backend, **kwargs)

    return made

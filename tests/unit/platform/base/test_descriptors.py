"""The limit of file descriptors is raised, and divided between clients and all else."""

from __future__ import annotations

import resource

import pytest

from loomserve.platform.base import descriptors

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Soft and hard limit of this process, the last one of the list."""
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: kept[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: kept.append(both))
    return kept


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 2**20), (2**16, 2**20)),
        ((1024, 4096), (4096, 4096)),
        ((1024, 1024), (1024, 1024)),
        ((1024, UNLIMITED), (2**16, UNLIMITED)),
        ((2**20, 2**20), (2**20, 2**20)),
        ((UNLIMITED, UNLIMITED), (UNLIMITED, UNLIMITED)),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be_and_never_lowered(
    before: tuple[int, int], after: tuple[int, int], limits: list[tuple[int, int]]
) -> None:
    limits.append(before)
    descriptors.raise_limit()
    assert limits[-1] == after


@pytest.mark.parametrize(
    ("soft", "for_clients", "fit", "fit_with_two_ports"),
    [
        (256, 192, 64, 32),
        (1024, 768, 640, 320),
        (2048, 1792, 1024, 832),
        (2**16, 2**16 - 256, 1024, 1024),
        (UNLIMITED, 2**16 - 256, 1024, 1024),
        (64, 48, 0, 0),
    ],
)
def test_clients_leave_descriptors_for_all_else(
    soft: int, for_clients: int, fit: int, fit_with_two_ports: int, limits: list[tuple[int, int]]
) -> None:
    limits.append((soft, UNLIMITED))
    assert descriptors.for_clients() == for_clients
    assert descriptors.connections_that_fit(1024, 1) == fit
    assert descriptors.connections_that_fit(1024, 2) == fit_with_two_ports

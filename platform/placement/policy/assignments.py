"""Gives models their first devices, before anybody has asked for any.

Nothing is known of their traffic then. Models go in the order of the file, to devices by their free
memory and a balance between them. A model that is loaded again later goes where there is room and
least to do (``sites.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Start = Literal["auto", "now", "on_demand"]


@dataclass(frozen=True)
class Spot:
    """A device, with the bytes that models on it may take together; ``cores`` is None of a GPU."""

    name: str
    memory: float
    cores: int | None = 1

    @property
    def is_gpu(self) -> bool:
        return self.cores is None


@dataclass(frozen=True)
class Newcomer:
    """A model without devices, and the bytes of a replica. ``replicas`` is None: one, and further
    ones on devices that no other model has."""

    name: str
    size: float
    start: Start = "auto"
    replicas: int | None = None


@dataclass(frozen=True)
class DeviceAssignment:
    """Where a model's replicas are first, then where else they may come; how many there are to be,
    whether it is loaded with the platform, and why, for a person."""

    devices: tuple[str, ...]
    replicas: int
    starts: bool
    why: str


@dataclass(frozen=True)
class NotAssigned:
    """Why a model has no place; ``field`` is the model's that says too much."""

    why: str
    field: str


@dataclass
class Taken:
    """What models that are placed take of each device: bytes and number of those that start with
    the platform, and bytes ``expected`` of all whose assignment it is, loaded or not."""

    memory: dict[str, float] = field(default_factory=dict)
    starting: dict[str, int] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)

    def add(self, device: str, size: float, *, starts: bool) -> None:
        self.expected[device] = self.expected.get(device, 0.0) + size
        if starts:
            self.memory[device] = self.memory.get(device, 0.0) + size
            self.starting[device] = self.starting.get(device, 0) + 1


def first_assignments(
    newcomers: Sequence[Newcomer], spots: Sequence[Spot], taken: Taken
) -> dict[str, DeviceAssignment | NotAssigned]:
    """An assignment for each model, by its name; those that start never take more than there is.
    ``newcomers`` are in the order of the file; to ``taken``, by models with given devices, it
    adds."""
    assignments = {each.name: _assigned(each, spots, taken) for each in newcomers}
    _fill_empty(newcomers, spots, taken, assignments)
    return assignments


def _assigned(
    model: Newcomer, spots: Sequence[Spot], taken: Taken
) -> DeviceAssignment | NotAssigned:
    possible = [each for each in spots if model.size <= each.memory]
    # A model's devices are of one kind; where there are GPUs, they are what the cores serve.
    if any(each.is_gpu for each in possible):
        possible = [each for each in possible if each.is_gpu]
    wanted = model.replicas or 1
    if not possible:
        return NotAssigned(_too_large(model, spots), "source")
    if wanted > len(possible):
        names = ", ".join(each.name for each in possible)
        why = f"it asks for {wanted} replicas, one a device, and {names} can have one each"
        return NotAssigned(why, "replicas")
    starting = [] if model.start == "on_demand" else _with_room(model, possible, taken)[:wanted]
    if len(starting) == wanted:
        return _settled(model, starting, possible, taken, starts=True)
    if model.start == "now":
        free = ", ".join(f"{each.name} {_gib(_free(each, taken))}" for each in possible)
        return NotAssigned(f"it needs {_gib(model.size)}, and so much is left: {free}", "start")
    # Where it will find least that other models want too.
    quiet = sorted(possible, key=lambda each: taken.expected.get(each.name, 0.0) / each.memory)
    quiet = quiet[:wanted]
    return _settled(model, quiet, possible, taken, starts=False)


def _with_room(model: Newcomer, possible: Iterable[Spot], taken: Taken) -> list[Spot]:
    """Devices on which it may start, the one with the most room first."""
    there = [each for each in possible if model.size <= _free(each, taken)]
    if model.start == "auto":
        # Engines that start at once on one core merely wait for each other.
        there = [
            each
            for each in there
            if each.cores is None or taken.starting.get(each.name, 0) < each.cores
        ]
    return sorted(there, key=lambda each: -_free(each, taken))


def _settled(
    model: Newcomer, chosen: Sequence[Spot], possible: Sequence[Spot], taken: Taken, *, starts: bool
) -> DeviceAssignment:
    why = _why(model, chosen, possible, taken, starts=starts)
    for each in chosen:
        taken.add(each.name, model.size, starts=starts)
    rest = [each.name for each in possible if each not in chosen]
    return DeviceAssignment((*(each.name for each in chosen), *rest), len(chosen), starts, why)


def _why(
    model: Newcomer, chosen: Sequence[Spot], possible: Sequence[Spot], taken: Taken, *, starts: bool
) -> str:
    names = ", ".join(each.name for each in chosen)
    if starts:
        free = min(_free(each, taken) for each in chosen)
        most = "the most room" if len(possible) > len(chosen) else "room"
        return f"{names} had {most}: {_gib(free)}, of which it takes {_gib(model.size)}"
    if model.start == "on_demand":
        return f"{names} has the fewest bytes of models; it comes when it is asked for"
    if not any(model.size <= _free(each, taken) for each in possible):
        return f"{_gib(model.size)} are left nowhere by models before it in the file"
    return "each core has a model that starts already; it comes when it is asked for"


def _fill_empty(
    newcomers: Sequence[Newcomer],
    spots: Sequence[Spot],
    taken: Taken,
    assignments: dict[str, DeviceAssignment | NotAssigned],
) -> None:
    """Further replicas on devices that no model has, one a model in turn."""
    empty = [each for each in spots if each.name not in taken.expected]
    for spot in empty:
        for model in sorted(newcomers, key=lambda each: _replicas(assignments[each.name])):
            assignment = assignments[model.name]
            if (
                not isinstance(assignment, DeviceAssignment)
                or not assignment.starts
                or model.replicas is not None
            ):
                continue
            if spot.name in assignment.devices and model.size <= spot.memory:
                assignments[model.name] = _grown(assignment, spot)
                taken.add(spot.name, model.size, starts=True)
                break


def _replicas(assignment: DeviceAssignment | NotAssigned) -> int:
    return assignment.replicas if isinstance(assignment, DeviceAssignment) else 0


def _grown(assignment: DeviceAssignment, spot: Spot) -> DeviceAssignment:
    there = assignment.devices[: assignment.replicas]
    rest = [name for name in assignment.devices if name not in (*there, spot.name)]
    return DeviceAssignment(
        (*there, spot.name, *rest),
        assignment.replicas + 1,
        assignment.starts,
        f"{assignment.why}; {spot.name} has no other model",
    )


def _free(spot: Spot, taken: Taken) -> float:
    return spot.memory - taken.memory.get(spot.name, 0.0)


def _too_large(model: Newcomer, spots: Sequence[Spot]) -> str:
    largest = max((each.memory for each in spots), default=0.0)
    return f"it needs {_gib(model.size)}, and no device may give models more than {_gib(largest)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def unplaced(assignments: Mapping[str, DeviceAssignment | NotAssigned]) -> dict[str, NotAssigned]:
    """Those that have no assignment, by their names."""
    return {
        name: assignment
        for name, assignment in assignments.items()
        if isinstance(assignment, NotAssigned)
    }

"""What a migration's state is made of: phases, commands to its parties, and what they answer.

Transitions stand in :mod:`.protocol`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.rebalancing.actions import Move


class Party(StrEnum):
    """Who is told to do something."""

    ENGINE = "engine"  # whose work it is: it runs the steps, schedules, and has all tokens
    LENDER = "lender"  # on whose device part of that work is done
    GATEWAY = "gateway"  # which has all tokens that clients were sent, and can go on elsewhere


Side = Literal[Party.ENGINE, Party.LENDER]
"""The part's origin or destination: which is which, the move says."""


class Phase(StrEnum):
    PLANNED = "planned"
    PREPARING = "preparing"  # full blocks are copied while steps run, in rounds
    PAUSED = "paused"  # no step runs; the last blocks are copied
    SWITCHED = "switched"  # the destination owns the KV; no step runs, so the origin's is whole
    CLEANING = "cleaning"  # steps run with the destination; the origin gives its memory back
    DONE = "done"
    ROLLING_BACK = "rolling_back"  # the origin owns the KV; the destination gives its memory back
    ABORTED = "aborted"
    RECOMPUTING = "recomputing"  # the lender died with the only copy; its requests start anew
    RECOMPUTED = "recomputed"
    ABANDONING = "abandoning"  # the engine died; its requests go on elsewhere
    ABANDONED = "abandoned"


ENDS = frozenset({Phase.DONE, Phase.ABORTED, Phase.RECOMPUTED, Phase.ABANDONED})


class Do(StrEnum):
    """A command. Each is answered with ``Done`` or ``Failed``; a fence with ``Died``."""

    RESERVE = "reserve"  # destination: take the memory, load the weights
    COPY = "copy"  # engine: copy what the destination lacks of full blocks, while steps run
    FLUSH = "flush"  # engine: stand still between two steps, copy the rest, have it checked
    ACTIVATE = "activate"  # destination: serve the part in this epoch
    RESUME = "resume"  # engine: run steps with the part where the command's owner says
    FREE = "free"  # origin: give the part's memory back and lay the rest out anew
    RELEASE = "release"  # destination, or a dead engine's lender: forget the part, free its memory
    RECOMPUTE = "recompute"  # engine: run steps; compute again from tokens what lost its KV
    REQUEUE = "requeue"  # gateway: continue the dead engine's streams elsewhere
    FENCE = "fence"  # to whoever can: kill this side's process, and say when it is dead


class Why(StrEnum):
    """Why a migration did not reach its end."""

    OPERATOR = "operator"
    ENGINE_DIED = "engine_died"
    LENDER_DIED = "lender_died"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    PAUSE_TOO_LONG = "pause_too_long"  # KV grows as fast as it is copied
    ERROR = "error"


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Command(_Value):
    """To one party.

    A party does a (migration, step, command) once, and answers it as often as it is told; it
    ignores what is of an earlier step than it has seen, blocks that another side copies to it
    included, which carry the step. So commands may be lost, repeated or late. A side serves the
    part in the newest epoch that it knows, and only as owner.
    """

    migration: str
    do: Do
    to: Party
    step: int
    epoch: int
    owner: Side


class Rules(_Value):
    """
    Attributes:
        most_rounds: Of copying while steps run.
        pause_bytes: What may be left for the pause: bandwidth times what the pause may take.
        answer_s: For memory, weights, or a round of copying.
        pause_s: For what happens while no step runs.
        tries: How often cleaning up is asked for before a silent side's engine is killed.
    """

    most_rounds: int = Field(5, ge=1)
    pause_bytes: int = Field(ge=0)
    answer_s: float = Field(60.0, gt=0)
    pause_s: float = Field(1.0, gt=0)
    tries: int = Field(3, ge=1)


class Migration(_Value):
    """All that a controller needs to go on; saved before its commands are sent.

    Attributes:
        owner: Whose copy of the part's KV counts: always exactly one side's.
        epoch: Grows with each change of the owner.
        step: Grows with each new set of commands.
        awaiting: Commands without an answer; no others are under way.
        deadline_s: When they are overdue, in seconds of the caller's clock.
        round: Of copying.
        tries: How often ``awaiting`` was asked for.
        dead: Sides that were seen to die.
        why: What went wrong, first.
    """

    id: str
    move: Move
    rules: Rules
    phase: Phase = Phase.PLANNED
    owner: Side
    epoch: int = 0
    step: int = 0
    awaiting: tuple[Command, ...] = ()
    deadline_s: float | None = None
    round: int = 0
    tries: int = 0
    dead: frozenset[Party] = frozenset()
    why: Why | None = None

    @property
    def origin(self) -> Side:
        return Party.LENDER if self.move.back else Party.ENGINE

    @property
    def destination(self) -> Side:
        return Party.ENGINE if self.move.back else Party.LENDER

    @property
    def ended(self) -> bool:
        return self.phase in ENDS


def planned(id_: str, move: Move, rules: Rules) -> Migration:
    """Nothing has been asked of anyone."""
    owner: Side = Party.LENDER if move.back else Party.ENGINE
    return Migration(id=id_, move=move, rules=rules, owner=owner)


class _Event(_Value):
    at_s: float = Field(description="Of the caller's clock.")


class Start(_Event):
    event: Literal["start"] = "start"


class Done(_Event):
    """``left_bytes`` after a round of copying: what the target lacks by now."""

    event: Literal["done"] = "done"
    do: Do
    by: Party
    step: int
    left_bytes: int = Field(0, ge=0)


class Failed(_Event):
    """The party lives, and has not done it."""

    event: Literal["failed"] = "failed"
    do: Do
    by: Party
    step: int
    why: Literal[Why.OUT_OF_MEMORY, Why.ERROR]


class Died(_Event):
    """The side's engine is gone for good: its process has ended, so it computes nothing more."""

    event: Literal["died"] = "died"
    side: Side


class Abort(_Event):
    event: Literal["abort"] = "abort"


class Tick(_Event):
    """Time has passed."""

    event: Literal["tick"] = "tick"


Event = Annotated[Start | Done | Failed | Died | Abort | Tick, Field(discriminator="event")]

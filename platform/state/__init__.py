"""What processes and operators are told of each other: typed, frozen, JSON."""

from loomserve.platform.state.batch import BatchLaneState, BatchState, StaticModelState
from loomserve.platform.state.kvstore import KvModelState, KvState
from loomserve.platform.state.lending import (
    BorrowingState,
    LendingModelState,
    LendingPairState,
    LendingState,
    LentState,
    LoanState,
    PartState,
    SplitState,
)
from loomserve.platform.state.load import (
    FootprintState,
    Pace,
    ReplicaLoad,
    SchedulingState,
    WorkState,
)
from loomserve.platform.state.platform import (
    DeviceState,
    ModelState,
    ModelStatus,
    ReplicaState,
    StageState,
    State,
    Versions,
)

__all__ = [
    "BatchLaneState",
    "BatchState",
    "BorrowingState",
    "DeviceState",
    "FootprintState",
    "KvModelState",
    "KvState",
    "LendingModelState",
    "LendingPairState",
    "LendingState",
    "LentState",
    "LoanState",
    "ModelState",
    "ModelStatus",
    "Pace",
    "PartState",
    "ReplicaLoad",
    "ReplicaState",
    "SchedulingState",
    "SplitState",
    "StageState",
    "State",
    "StaticModelState",
    "Versions",
    "WorkState",
]

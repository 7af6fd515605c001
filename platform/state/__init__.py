"""States of the platform's parts, as processes and operators see them: frozen, JSON."""

from loomserve.platform.state.batch import BatchLaneState, BatchState, OfflineModelState
from loomserve.platform.state.kvstore import KvModelState, KvNetworkState, KvPeerState, KvState
from loomserve.platform.state.lending import (
    BorrowingState,
    LendingModelState,
    LendingPairState,
    LendingState,
    LentState,
    LoanState,
    ShardState,
    SlicingState,
)
from loomserve.platform.state.load import (
    FootprintState,
    Pace,
    ReplicaLoad,
    SchedulingState,
    WorkState,
)
from loomserve.platform.state.parsers import ChatParsers, ParserChoice
from loomserve.platform.state.platform import (
    AdapterState,
    AliasState,
    DeviceState,
    ModelEvent,
    ModelEvents,
    ModelState,
    ModelStatus,
    NodeState,
    NodeStatus,
    PlatformState,
    Presence,
    ReplicaState,
    ScalingState,
    SoftwareVersions,
    StageState,
)

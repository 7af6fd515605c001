"""The section ``cluster``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loomserve.platform.config.base import Section

ClusterAddress = Annotated[
    str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:]+\]):\d{1,5}$")
]


class Cluster(Section):
    """The nodes that ``loomserve node`` has started, and on which engines run."""

    address: ClusterAddress | None = Field(
        None, description="HOST:PORT of the cluster's head; null: as RAY_ADDRESS says."
    )
    token_file: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="File with the cluster's token, the same on all nodes, relative to this file; "
        "null: cluster-token in the user's cache folder ($LOOMSERVE_HOME).",
    )
    gateways: Literal["one_node", "each_node"] = Field(
        "one_node",
        description="Where requests are taken. one_node: on the node that keeps what there is but "
        "once; each_node: on every node that is up, so that none is missed; server.host must be an "
        "address of each (0.0.0.0, :: or loopback), and keys hold over all.",
    )
    join_timeout_s: float = Field(
        60.0, gt=0, description="How long the start waits for the nodes that devices name."
    )

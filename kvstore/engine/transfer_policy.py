"""What an engine's scheduler decides about the connector's copies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from loomserve.kvstore.engine.messages import Transferred

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.request import Request


class TransferPolicy(Protocol):
    """Decisions about loads and saves, asked for in each step, and reports of what they took."""

    @property
    def prefetches(self) -> bool:
        """Whether requests that were swapped out are loaded beside steps of others."""

    def early_blocks(self, tokens: int) -> int:
        """Blocks that may be saved, as they fill, beside a step of so many tokens.

        The step lasts as long as its saves. Blocks of preempted requests are saved in any case.
        """

    def in_own_memory(self, request: Request) -> bool:
        """Whether the request's blocks are where they can be copied, not with a lender."""

    def worth_loading(self, tokens: int) -> bool:
        """Whether that many tokens are loaded sooner than computed."""

    def on_transfer(self, done: Transferred) -> None:
        """Learn from copies that have ended."""

    def stats(self) -> KVConnectorStats | None:
        """Numbers to be told to the engine's front end."""


class TransferAll:
    """The policy under vLLM's own scheduler: save every full block, load every block there is."""

    prefetches = False

    def early_blocks(self, tokens: int) -> int:
        return sys.maxsize

    def in_own_memory(self, request: Request) -> bool:
        return True

    def worth_loading(self, tokens: int) -> bool:
        return True

    def on_transfer(self, done: Transferred) -> None:
        pass

    def stats(self) -> KVConnectorStats | None:
        return None

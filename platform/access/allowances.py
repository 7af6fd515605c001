"""What one gateway may use of limits that hold over the gateways of all nodes.

The controller divides them (:mod:`.policy.pools`). A gateway uses what it has in hand without
asking anybody, and asks every second, or as soon as it has had to refuse. Without a controller it
goes on with its last part of each rate, and with what it has in hand of the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from loomserve.platform.access.policy.bank import LimitAnswer, LimitReport
from loomserve.platform.access.policy.pools import (
    EXCHANGE_S,
    SILENT_S,
    Limit,
    LimitKind,
    Slice,
    Use,
)

_log = logging.getLogger("ray.serve")

# It does not ask more often than that, however much it refuses.
_SHORTEST_S = 0.1
# A limit that was not used for so long is given back; one of a day stays until that is over.
_IDLE_S = 60.0
_DAY_S = 86_400.0
# How many seconds' worth of its part of a rate a gateway may gather alone.
_GATHERED_S = 10.0


@dataclass
class _Account:
    """A limit as this gateway uses it."""

    limit: Limit
    used: float = 0.0
    in_hand: float = 0.0
    wanted: float = 0.0
    """In this period; of sequences the most at once."""
    wanted_before: float = 0.0
    told: Slice | None = None
    filled_at: float = 0.0
    """Until when its part of the rate is in hand."""
    touched_at: float = 0.0
    mean: float = 1.0
    """Of units used at once."""


class Allowances:
    """The limits in use of one gateway; used on its event loop only."""

    def __init__(self, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``node``: whose day's tokens are counted together."""
        self.gateway = uuid.uuid4().hex
        self._node = node
        self._clock = clock
        self._accounts: dict[tuple[str, LimitKind], _Account] = {}
        self._gateways = 2
        self._answered_at = clock()
        self._wanting = asyncio.Event()
        self._alone = False

    def room(self, limit: Limit, used: float = 0.0) -> float:
        """Units that this gateway may use now; to be asked before they are used. A limit of which
        nothing was told yet has a small share: half of an equal part. Of a day, ``used`` is what
        this node has used of it so far."""
        account = self._account(limit, used)
        self._fill(account)
        if account.told is not None:
            return account.in_hand
        return account.in_hand + max(1.0, limit.most / (2 * self._gateways))

    def use(self, limit: Limit, units: float, used: float = 0.0) -> None:
        """Use units, whether or not there is room; ``used`` as for :meth:`room`."""
        account = self._account(limit, used)
        account.touched_at = self._clock()
        account.used += units
        account.in_hand -= units
        account.mean += 0.1 * (units - account.mean)
        if limit.kind is LimitKind.RUNNING:
            account.wanted = max(account.wanted, account.used)
        else:
            account.wanted += units

    def end(self, limit: Limit, units: float) -> None:
        account = self._account(limit)
        account.used -= units
        account.in_hand += units

    def refused(self, limit: Limit, units: float | None = None) -> float:
        """Note a request of so many units (None: the mean); seconds until there may be room."""
        account = self._account(limit)
        account.touched_at = self._clock()
        account.wanted += account.mean if units is None else units
        self._wanting.set()
        soon = max(_SHORTEST_S, self._answered_at + EXCHANGE_S - self._clock())
        told = account.told
        if not limit.kind.comes_back or told is None or told.per_s <= 0:
            return soon
        return max(soon, (1 - account.in_hand) / told.per_s)

    def is_used_up(self, limit: Limit) -> bool:
        """Whether all gateways together have used it up, as far as that has been told."""
        account = self._accounts.get((limit.name, limit.kind))
        return account is not None and account.told is not None and account.told.left <= 0

    async def keep(self, ask: Callable[[LimitReport], Awaitable[LimitAnswer]]) -> NoReturn:
        """Ask every second, and as soon as more is wanted, until the task is cancelled."""
        while True:
            await asyncio.sleep(_SHORTEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(EXCHANGE_S - _SHORTEST_S):
                    await self._wanting.wait()
            self._wanting.clear()
            report = self.report()
            try:
                self.apply(report, await ask(report))
            except Exception as error:  # whatever keeps the controller from answering
                if not self._alone:
                    _log.warning("limits are not divided anew: %r", error)
                self._alone = True
            else:
                self._alone = False

    def report(self) -> LimitReport:
        """What to tell the controller."""
        now = self._clock()
        for place, account in list(self._accounts.items()):
            if self._is_idle(account, now):
                del self._accounts[place]
            else:
                self._fill(account)
        return LimitReport(self.gateway, self._node, tuple(map(_use, self._accounts.values())))

    def apply(self, report: LimitReport, answer: LimitAnswer) -> None:
        self._gateways = max(2, answer.gateways)
        self._answered_at = now = self._clock()
        for use, told in zip(report.uses, answer.slices, strict=True):
            account = self._accounts.get((use.limit.name, use.limit.kind))
            if account is None:
                continue
            if told.known or account.told is not None:
                account.told, account.filled_at = told, now
            account.in_hand += told.more
            if use.limit.kind.comes_back:
                account.used -= use.used
            account.wanted_before, account.wanted = use.wanted, 0.0
            if use.limit.kind is LimitKind.RUNNING:
                account.wanted = account.used

    def _account(self, limit: Limit, used: float = 0.0) -> _Account:
        place = (limit.name, limit.kind)
        account = self._accounts.get(place)
        if account is None:
            account = self._accounts[place] = _Account(limit, used, touched_at=self._clock())
        elif account.limit != limit:
            account.limit = limit
        return account

    def _fill(self, account: _Account) -> None:
        """Have the part of the rate in hand that is due while nobody answers."""
        now, told = self._clock(), account.told
        since = max(account.filled_at, self._answered_at + SILENT_S)
        if told is None or now <= since:
            return
        account.filled_at = now
        most = max(1.0, told.per_s * _GATHERED_S)
        if account.in_hand < most:
            account.in_hand = min(most, account.in_hand + told.per_s * (now - since))

    def _is_idle(self, account: _Account, now: float) -> bool:
        kind, idle_s = account.limit.kind, now - account.touched_at
        if kind is LimitKind.DAY:
            return idle_s > _DAY_S
        busy = kind is LimitKind.RUNNING and account.used > 0
        # Who knew nothing of a limit that is used up would have a small share of it.
        over = account.in_hand < 0 or (account.told is not None and account.told.left < 1)
        return not (busy or over) and idle_s > _IDLE_S


def _use(account: _Account) -> Use:
    wanted = account.wanted
    if account.limit.kind is LimitKind.RUNNING:
        wanted -= account.used
    return Use(
        account.limit, account.used, account.in_hand, max(wanted, account.wanted_before / 2, 0.0)
    )

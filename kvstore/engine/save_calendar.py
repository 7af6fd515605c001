"""When an engine's requests reach the tokens that something is to be done at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class SaveCalendar:
    """Tokens computed of each request of the last step, and the steps for which some are entered.

    In most steps all requests of the step before get one token more, so that one count stands for
    the tokens of all. Who comes, is preempted or resumed, or gets another number of tokens is told
    apart by sums, and has to be entered again.
    """

    def __init__(self) -> None:
        self._step = 0
        self._ahead: dict[str, int] = {}
        """Of each request of the last step: its tokens, less the number of steps."""
        self._expected = 0
        """Tokens computed before the next step, if that has the same requests as the last one."""
        self._entered: dict[int, list[str]] = {}
        self._entry: dict[str, int] = {}

    def tokens(self, request_id: str) -> int:
        """Tokens of a request of the last step that are computed once that has ended."""
        return self._ahead[request_id] + self._step

    def ahead(self, request_id: str) -> int:
        """The same without what all requests gain alike."""
        return self._ahead[request_id]

    def enter(self, request_id: str, tokens: int) -> None:
        """Have the request come up in the step that brings it to so many tokens, and only then."""
        at = tokens - self._ahead[request_id]
        self._entry[request_id] = at
        self._entered.setdefault(at, []).append(request_id)

    def forget(self, request_id: str) -> None:
        self._ahead.pop(request_id, None)
        self._entry.pop(request_id, None)

    def next_step(self, scheduled: SchedulerOutput) -> Iterable[str]:
        """Go on to a step; returns who is to be entered again, and who was entered for it."""
        tokens, cached = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
        if not tokens:
            return ()
        self._step += 1
        before, count = sum(cached.num_computed_tokens), scheduled.total_num_scheduled_tokens
        expected, self._expected = self._expected, before + count
        as_before = (
            before == expected
            and count == len(tokens)
            and not scheduled.scheduled_new_reqs
            and tokens.keys() == self._ahead.keys()
        )
        again = [] if as_before else self._changed(scheduled)
        for each in self._entered.pop(self._step, ()):
            if self._entry.get(each) == self._step and each in self._ahead:
                again.append(each)
        return dict.fromkeys(again)

    def _changed(self, scheduled: SchedulerOutput) -> list[str]:
        cached = scheduled.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            before[new.req_id] = new.num_computed_tokens
            self._expected += new.num_computed_tokens
        known, step = self._ahead, self._step
        self._ahead = {
            each: before[each] + count - step
            for each, count in scheduled.num_scheduled_tokens.items()
        }
        return [each for each, ahead in self._ahead.items() if known.get(each) != ahead]

"""Which of an engine's computed blocks are saved in the store, and which come next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from loomserve.kvstore.engine.namespaces import Namespaces
from loomserve.kvstore.engine.pace import StepPace, TailBudget
from loomserve.kvstore.engine.request_keys import (
    chain_of,
    hands_over,
    next_tail,
    tail_end,
    tail_key_of,
)
from loomserve.kvstore.engine.swap_ledger import HANDOFF_S
from loomserve.kvstore.engine.transfers.transfer import Save
from loomserve.kvstore.index.radix import KEY_BYTES

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


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


# vLLM's placeholder in block tables.
_NULL_BLOCK = 0


@dataclass
class _Saved:
    """What is saved of a request: ``blocks`` full ones, and maybe a part of the next one.

    ``tail`` are the tokens up to which the unfilled block was saved last (0: it was not), and
    ``tail_chain`` the keys of the blocks before that, and its own.
    """

    blocks: int = 0
    tail: int = 0
    tail_chain: bytes = b""

    def tokens(self, block_size: int) -> int:
        return max(self.tail, self.blocks * block_size)


class SaveTracker:
    """Progress of saving, in blocks of each unfinished request; no full block is saved twice.

    Once the prompt is computed, the block that the answer fills is saved in parts, each of them
    in the place of the one before, as many as the budget has: first where most is not saved.
    """

    def __init__(self, names: Namespaces, pace: StepPace, tails: TailBudget) -> None:
        self._names = names
        self._block_size = names.block_size
        self._pace = pace
        self._tails = tails
        self._requests: dict[str, Request] = {}
        self._saved: dict[str, _Saved] = {}
        self._calendar = SaveCalendar()
        self._due: dict[str, int] = {}
        """Requests with something to save, and what orders them: the least has most of it."""
        self._full: set[str] = set()
        """Of these, those with a full block, or that hand over."""

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        self._forget(request.request_id)
        self._requests[request.request_id] = request
        self._saved.setdefault(request.request_id, _Saved())

    def remove(self, request: Request) -> bytes:
        """Forget a request; returns the chain of its unfilled block, if that was saved."""
        self._forget(request.request_id)
        self._requests.pop(request.request_id, None)
        return self._saved.pop(request.request_id, _Saved()).tail_chain

    def unsaved_blocks(self, request: Request, tokens: int) -> int:
        """Blocks of the request's first ``tokens`` that have not been saved."""
        saved = self._saved.get(request.request_id, _Saved())
        return -(-tokens // self._block_size) - saved.blocks

    def swapped_out(self, request: Request, tokens: int) -> None:
        """Note that the full blocks of the request's first ``tokens`` are saved another way."""
        saved = self._saved.setdefault(request.request_id, _Saved())
        saved.blocks = max(tokens // self._block_size, saved.blocks)
        self._forget(request.request_id)

    def saves(
        self,
        scheduled: SchedulerOutput,
        early_blocks: Callable[[], int],
        in_own_memory: Callable[[Request], bool],
        now: float,
    ) -> Iterator[dict[int, Save]]:
        """Saves beside this step, by rank. ``early_blocks`` says how many may be saved of requests
        that do not hand over, and is asked if there are any. ``in_own_memory``: whether a request's
        blocks are where they can be copied. ``now`` is when the step begins."""
        for request_id in self._calendar.next_step(scheduled):
            self._enter(request_id)
        room = self._tails.blocks(now) > 0
        if not (self._full or (room and self._due)):
            return
        early, tables = early_blocks(), scheduled.kv_connector_block_state
        found = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for request_id in self._candidates(scheduled, room):
            if not room and request_id not in self._full:
                # Its unfilled block comes in a later step.
                continue
            request, after = self._requests[request_id], self._calendar.tokens(request_id)
            if not (self._has_new(request_id, after, room) and in_own_memory(request)):
                continue
            saved = self._saved[request_id]
            outdated, before = saved.tail_chain[-KEY_BYTES:], saved.blocks
            if hands_over(request):
                keys = self._to_hand_over(request, after, saved)
            else:
                keys = self._computed(request, after, saved, early, room=room)
                early -= max(0, len(keys) // KEY_BYTES - before)
                room = room and self._tails.blocks(now) > 0
            self._enter(request_id)
            if not keys:
                continue
            blocks = tables.get_block_ids(request_id)[0][: len(keys) // KEY_BYTES]
            if _NULL_BLOCK in blocks:
                # A sliding window has passed them, and their KV is gone.
                continue
            # What a request begins with is from the store, or was saved when it was computed.
            first = min(max(before, found.get(request_id, 0) // self._block_size), len(blocks))
            recompute_s = self._block_size * self._pace.s_per_token
            keep_s = HANDOFF_S if hands_over(request) else 0.0
            yield {
                rank: Save(name, keys, blocks, recompute_s, keep_s, outdated, first)
                for rank, name in enumerate(self._names.of_ranks(request.lora_request))
            }

    def _candidates(self, scheduled: SchedulerOutput, room: bool) -> list[str]:
        """Requests of this step that may have something to save, first where most is not saved."""
        asked = self._due if room else self._full
        new = (each.req_id for each in scheduled.scheduled_new_reqs)
        in_order = chain(new, scheduled.scheduled_cached_reqs.req_ids)
        return sorted((each for each in in_order if each in asked), key=self._due.__getitem__)

    def _enter(self, request_id: str) -> None:
        """Enter a request of the step for when it has more to save; if it has already, as due. The
        newest tokens may not be known yet, so that it stays due for some steps."""
        self._forget_due(request_id)
        request, size = self._requests.get(request_id), self._block_size
        if request is None:
            return
        saved, tokens = self._saved[request_id], self._calendar.tokens(request_id)
        kept = saved.tokens(size)
        full = (saved.blocks + 1) * size
        part = max(next_tail(kept, size), request.num_prompt_tokens)
        if tokens >= full or hands_over(request):
            self._full.add(request_id)
        if tokens >= part or request_id in self._full:
            self._due[request_id] = kept - self._calendar.ahead(request_id)
        later = [each for each in (full, part) if each > tokens]
        if later:
            self._calendar.enter(request_id, min(later))

    def _forget_due(self, request_id: str) -> None:
        self._full.discard(request_id)
        self._due.pop(request_id, None)

    def _forget(self, request_id: str) -> None:
        """Have the request entered again by the next step that it is in."""
        self._forget_due(request_id)
        self._calendar.forget(request_id)

    def _has_new(self, request_id: str, tokens: int, room: bool) -> bool:
        """Whether anything of what is computed may have to be saved; most steps add nothing."""
        request, saved = self._requests[request_id], self._saved[request_id]
        if hands_over(request):
            return True
        if self._full_blocks(request, tokens) > saved.blocks:
            return True
        return room and self._tail_end(request, tokens, saved) > 0

    def _full_blocks(self, request: Request, tokens: int) -> int:
        # Under async scheduling the newest tokens, and so their block's hash, are not known.
        return min(tokens // self._block_size, len(request.block_hashes))

    def _full_keys(self, request: Request, tokens: int) -> bytes:
        return chain_of(request, self._full_blocks(request, tokens))

    def _to_hand_over(self, request: Request, tokens: int, saved: _Saved) -> bytes:
        """Chain of what is computed of a prompt, to its last token; empty if that is saved."""
        keys = self._full_keys(request, tokens)
        full, prompt = len(keys) // KEY_BYTES, request.num_prompt_tokens
        if full and 0 < prompt - full * self._block_size < self._block_size and tokens >= prompt:
            keys += tail_key_of(request, keys, prompt, self._block_size, owned=False)
        if len(keys) // KEY_BYTES <= saved.blocks:
            return b""
        saved.blocks = len(keys) // KEY_BYTES
        return keys

    def _computed(
        self, request: Request, tokens: int, saved: _Saved, early: int, *, room: bool
    ) -> bytes:
        """Chain of what is computed of a request; empty if there is nothing to save.

        ``saved`` is brought up to date; ``early`` blocks may be saved, and with ``room`` a part of
        the next one.
        """
        keys = self._full_keys(request, tokens)
        full, before = len(keys) // KEY_BYTES, saved.blocks
        saved.blocks = max(before, min(full, before + early))
        keys = keys[: saved.blocks * KEY_BYTES]
        room = room and early > saved.blocks - before
        if room and 0 < full == saved.blocks and (end := self._tail_end(request, tokens, saved)):
            keys += tail_key_of(request, keys, end, self._block_size, owned=False)
            saved.tail, saved.tail_chain = end, keys
            self._tails.spend()
            return keys
        if saved.blocks == before:
            return b""
        saved.tail_chain = b""
        return keys

    def _tail_end(self, request: Request, tokens: int, saved: _Saved) -> int:
        """Tokens up to which the block that an answer fills is to be saved; 0: it is, or empty."""
        if tokens < request.num_prompt_tokens:
            return 0
        end = tail_end(min(tokens, len(request.all_token_ids)), self._block_size)
        return end if end > saved.tokens(self._block_size) else 0

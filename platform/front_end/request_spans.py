"""The spans of a request in its HTTP request's trace, one a replica that had it."""

from __future__ import annotations

from loomserve.platform.tracing import RequestTrace, Span

HANDED_OVER = "handed_over"
FINISHED = "finished"
ABORTED = "aborted"
"""Why a request leaves a replica, beside losses."""


class RequestSpans:
    """The spans of one sequence: where it was, for what, and why it left."""

    __slots__ = ("_left", "_request_id", "_span", "_trace", "_was_with")

    def __init__(self, trace: RequestTrace, request_id: str) -> None:
        """``request_id``: one for each of several answers to one prompt."""
        self._trace, self._request_id = trace, request_id
        self._span: Span | None = None
        self._was_with = self._left = ""

    def begin(self, replica_id: str, *, prompt_only: bool, attempt: int) -> None:
        name = "prefill" if prompt_only else "decode" if self._handed_over else "answer"
        attributes: dict[str, str | int] = {
            "loomserve.sequence": self._request_id,
            "loomserve.replica": replica_id,
            "loomserve.attempt": attempt,
        }
        if self._was_with:
            attributes["loomserve.from"] = self._was_with
            attributes["loomserve.why"] = self._left
            what = "hand_off" if self._handed_over else "continuation"
            self._trace.event(what, {**attributes, "loomserve.to": replica_id})
        self._span = self._trace.begin(name, attributes)
        self._was_with = replica_id

    def end(self, why: str, tokens: int) -> None:
        """Leave the replica, if it is with one; ``tokens``: of its answer so far."""
        if self._span is None:
            return
        self._span.set_attributes({"loomserve.left": why, "loomserve.tokens": tokens})
        self._span.end()
        self._span, self._left = None, why

    @property
    def _handed_over(self) -> bool:
        return self._left == HANDED_OVER

    def done(self, prompt: str, prompt_tokens: int, answer_tokens: int) -> None:
        """The request has ended; answers to one prompt share ``prompt``."""
        self._trace.add_tokens(prompt, prompt_tokens, answer_tokens)

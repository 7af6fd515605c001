"""What comes of an answer, token by token, without vLLM's objects of it unless somebody looks.

vLLM makes a ``RequestOutput`` and a ``CompletionOutput`` of each token, of which most streams pass
on the text alone.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter, is_
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

# With trace headers, which only an answer's end is told by.
_OF_ANY = {"request_id", "new_token_ids", "trace_headers"}
_more = attrgetter(*(each for each in EngineCoreOutput.__struct_fields__ if each not in _OF_ANY))
_NOTHING_MORE = _more(EngineCoreOutput("", []))


class Delta(RequestOutput):  # type: ignore[misc]
    """What came of one answer since its last result; there is more of it."""

    finished = False

    def __init__(self, state: DeltaState, tokens: list[int], text: str) -> None:
        self._state = state
        self.tokens = tokens
        self.text: str | None = text
        """None: vLLM's objects have been made, and have it."""

    def __getattr__(self, name: str) -> Any:
        """Of what is not there yet: one of vLLM's attributes."""
        text, state = self.text, self._state
        if text is None:
            raise AttributeError(name)
        self.text = None
        output = CompletionOutput(state.request_index, text, self.tokens, None, None)
        made = state._new_request_output(state.external_req_id, [output], False)
        # What has been added is kept, such as that the answer has ended.
        self.__dict__ |= vars(made) | vars(self)
        return getattr(self, name)

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        if type(next_output) is Delta and self.text is not None and next_output.text is not None:
            self.text += next_output.text
            self.tokens = [*self.tokens, *next_output.tokens]
        else:
            super().add(next_output, aggregate)


class DeltaState(RequestState):  # type: ignore[misc]
    """Of a request with one answer, of which vLLM is told the text and nothing else."""

    @classmethod
    def take_over(cls, state: RequestState) -> None:
        """Make the state one of these, if its request is such."""
        logprobs, detokenizer = state.logprobs_processor, state.detokenizer
        if (
            state.output_kind is RequestOutputKind.DELTA
            and state.queue is not None
            and state.parent_req is None
            and state.stream_interval == 1
            and not state.streaming_input
            and logprobs is not None
            and logprobs.logprobs is None
            and logprobs.prompt_logprobs is None
            and not getattr(detokenizer, "stop", True)
        ):
            state.__class__ = cls

    def takes(self, output: EngineCoreOutput) -> bool:
        """Whether the output says no more than that there is more text."""
        return not self.is_prefilling and all(map(is_, _more(output), _NOTHING_MORE))

    def take(self, tokens: list[int]) -> None:
        detokenizer = self.detokenizer
        detokenizer.update(tokens, False)
        self.queue.put(Delta(self, tokens, detokenizer.get_next_output_text(False, True)))


class EachResult(RequestOutputCollector):  # type: ignore[misc]
    """Results of a stream with log probabilities, step by step: vLLM adds up what comes while the
    client is behind, and would write it in one go."""

    _later: deque[Any]

    @classmethod
    def take_over(cls, state: RequestState) -> None:
        """Make the state's queue one of these, if its request is such."""
        probabilities, queue = state.logprobs_processor, state.queue
        if type(queue) is not RequestOutputCollector or not queue.aggregate:
            return
        if probabilities.logprobs is not None:
            queue.__class__, queue._later = cls, deque()

    def put(self, output: Any) -> None:
        if self.output is None or isinstance(output, Exception):
            super().put(output)
        else:
            self._later.append(output)

    async def get(self) -> Any:
        output = await super().get()
        self._show_next()
        return output

    def get_nowait(self) -> Any:
        output = super().get_nowait()
        self._show_next()
        return output

    def _show_next(self) -> None:
        if self.output is None and self._later:
            super().put(self._later.popleft())

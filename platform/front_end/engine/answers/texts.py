"""Answers' texts, without their prompts, and with all of their characters.

vLLM's detokenizers take a prompt that ends in the midst of a character for the beginning of its
answer, and keep back whole characters of an answer that ends in the midst of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import _convert_tokens_to_string_with_added_encoders
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.detokenizer import (
    BaseIncrementalDetokenizer,
    FastIncrementalDetokenizer,
    SlowIncrementalDetokenizer,
    check_stop_strings,
)
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from loomserve.platform.front_end.engine.answers.deltas import DeltaState, EachResult
from loomserve.platform.front_end.policy.prompt_end import UNFINISHED, Decode, PromptEnd, prompt_end

# Enough of an answer's end to show whether its last character is whole.
_LAST_TOKENS = 4
# Characters of a prompt's end whose tokens do not depend on what is before them.
_LAST_CHARACTERS = 16


class AnswerTexts(OutputProcessor):  # type: ignore[misc]
    """vLLM's output processor, with detokenizers that keep prompts and answers apart."""

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, *args: Any, **kwargs: Any
    ) -> None:
        is_new = request.request_id not in self.request_states
        super().add_request(request, prompt, *args, **kwargs)
        if is_new and request.prompt_token_ids:
            state = self.request_states[request.request_id]
            self._keep_apart(state, request)
            DeltaState.take_over(state)
            EachResult.take_over(state)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        when = engine_core_timestamp, iteration_stats
        others = [
            each for each in engine_core_outputs if not self._takes(each, weight_version, *when)
        ]
        return super().process_outputs(others, *when, weight_version)

    def _takes(self, output: EngineCoreOutput, weights: str | None, *when: Any) -> bool:
        """Take an output that says only that there is more text; False: it says more."""
        state = self.request_states.get(output.request_id)
        if type(state) is not DeltaState or not state.takes(output):
            return False
        self._update_stats_from_output(state, output, *when)
        if weights is not None:
            state.track_weight_version(weights)
        state.take(output.new_token_ids)
        return True

    def _keep_apart(self, state: RequestState, request: EngineCoreRequest) -> None:
        kinds = {FastIncrementalDetokenizer: FastAnswer, SlowIncrementalDetokenizer: SlowAnswer}
        kind = kinds.get(type(state.detokenizer))
        if kind is None:
            return
        assert self.tokenizer is not None
        assert request.sampling_params is not None
        prompt: Sequence[int] = request.prompt_token_ids or ()
        decode = kind.decoding(self.tokenizer, request.sampling_params.skip_special_tokens)
        echoed = self._echoes_half_a_character(state.prompt, prompt)
        if echoed:
            state.prompt = (state.prompt or "").rstrip(UNFINISHED)
        end = prompt_end(prompt, decode, echoed=echoed)
        state.detokenizer = kind.after(end, self.tokenizer, request, decode)
        if state.logprobs_processor is not None:
            state.logprobs_processor = AnswerLogprobs(**vars(state.logprobs_processor))
            state.logprobs_processor.begin_after(end, decode)

    def _echoes_half_a_character(self, prompt: str | None, tokens: Sequence[int]) -> bool:
        """Whether the prompt's text, made from its tokens to be echoed, ends inside a character.
        A text from the client may itself end with ``UNFINISHED``."""
        if prompt is None or not prompt.endswith(UNFINISHED):
            return False
        assert self.tokenizer is not None
        own = self.tokenizer.encode(UNFINISHED, add_special_tokens=False)
        given = self.tokenizer.encode(prompt[-_LAST_CHARACTERS:], add_special_tokens=False)
        return list(tokens[-len(own) :]) != list(given[-len(own) :])


class _Answer(BaseIncrementalDetokenizer):  # type: ignore[misc]
    """What both of vLLM's detokenizers lack."""

    output_text: str
    _end: PromptEnd
    _decode: Decode
    _began = False
    _ended = False

    @classmethod
    def after(
        cls, end: PromptEnd, tokenizer: TokenizerLike, request: EngineCoreRequest, decode: Decode
    ) -> _Answer:
        """The detokenizer of a request's answer, whose prompt ends so."""
        shortened = copy(request)
        shortened.prompt_token_ids = list(end.tokens)
        answer = cls(tokenizer, shortened)
        answer._end, answer._decode = end, decode
        # Before that, vLLM gives the prompt's end, too.
        answer._began = end.is_whole
        return answer

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        stop_string: str | None = super().update(new_token_ids, stop_terminated)
        self._ended |= stop_terminated or stop_string is not None
        return stop_string

    def decode_next(self, next_token_id: int) -> str:
        text: str = super().decode_next(next_token_id)
        if text and not self._began:
            self._began = True
            return self._end.answer_in(text)
        return text

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        if finished and not self._ended:
            self._ended = True
            self._show_kept()
        text: str = super().get_next_output_text(finished, delta)
        return text

    def _show_kept(self) -> None:
        """Add the whole characters that the last tokens have before one that is not whole."""
        tokens = self.output_token_ids
        if not self._decode(tokens[-_LAST_TOKENS:]).endswith(UNFINISHED):
            return
        whole = self._end.answer_in(self._decode([*self._end.tokens, *tokens]))
        kept = whole[len(self.output_text) :].rstrip(UNFINISHED)
        if not kept or not whole.startswith(self.output_text):
            return
        self.output_text += kept
        if self.num_output_tokens() > self.min_tokens and (
            stop := check_stop_strings(
                self.output_text, len(kept), self.stop, self.include_stop_str_in_output
            )
        ):
            _, end = stop
            self.output_text = self.output_text if end < 0 else self.output_text[:end]


class FastAnswer(_Answer, FastIncrementalDetokenizer):  # type: ignore[misc]
    """Of a tokenizer in Rust."""

    @staticmethod
    def decoding(tokenizer: TokenizerLike, skip_special_tokens: bool) -> Decode:
        backend = tokenizer._tokenizer
        return lambda tokens: backend.decode(tokens, skip_special_tokens=skip_special_tokens)


class SlowAnswer(_Answer, SlowIncrementalDetokenizer):  # type: ignore[misc]
    """Of any other tokenizer."""

    @classmethod
    def after(
        cls, end: PromptEnd, tokenizer: TokenizerLike, request: EngineCoreRequest, decode: Decode
    ) -> SlowAnswer:
        answer = super().after(end, tokenizer, request, decode)
        assert isinstance(answer, SlowAnswer)
        answer.tokens = _strings(tokenizer, end.tokens, answer.skip_special_tokens)
        # vLLM begins in the midst of characters, and takes a longer text for the answer's.
        answer.prefix_offset, answer.read_offset = 0, len(answer.tokens) if end.is_whole else 0
        return answer

    @staticmethod
    def decoding(tokenizer: TokenizerLike, skip_special_tokens: bool) -> Decode:
        if tokenizer.is_fast or not tokenizer.get_added_vocab():
            return lambda tokens: tokenizer.convert_tokens_to_string(
                _strings(tokenizer, tokens, skip_special_tokens)
            )
        return lambda tokens: _convert_tokens_to_string_with_added_encoders(
            tokenizer,
            _strings(tokenizer, tokens, skip_special_tokens),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=True,
        )


def _strings(tokenizer: TokenizerLike, tokens: Sequence[int], skip_special: bool) -> list[str]:
    found = tokenizer.convert_ids_to_tokens(list(tokens), skip_special_tokens=skip_special)
    return ["" if each is None else each for each in found]


class LatePromptLogprobs(list[Any]):
    """A prompt's log probabilities, as far as they have been formed of what an engine sent."""

    def __init__(
        self, formed: list[Any], form: Callable[[LogprobsTensors, LatePromptLogprobs], None]
    ) -> None:
        super().__init__(formed)
        self.tensors: list[LogprobsTensors] = []
        self._form = form

    async def form(self, at_once: int) -> None:
        """Form the rest, between whose slices the event loop turns."""
        tensors, self.tensors = self.tensors, []
        for given in tensors:
            tokens, width = given[0].shape
            for at in range(0, tokens, step := max(1, at_once // width)):
                rows = slice(at, at + step)
                self._form(given._make((*(each[rows] for each in given[:3]), *given[3:])), self)
                await asyncio.sleep(0)


class AnswerLogprobs(LogprobsProcessor):  # type: ignore[misc]
    """Log probabilities whose tokens' texts make up the answer's text."""

    _decode: Decode
    _before: PromptEnd
    """What has been said, up to a whole character, or of the prompt."""
    _since: list[int]
    """The answer's tokens since then."""
    _of_answer = False
    prompt_logprobs: list[Any] | None

    def begin_after(self, end: PromptEnd, decode: Decode) -> None:
        self._before, self._decode, self._since = end, decode, []
        if type(self.prompt_logprobs) is list:
            self.prompt_logprobs = LatePromptLogprobs(self.prompt_logprobs, self._form)

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        if isinstance(self.prompt_logprobs, LatePromptLogprobs):
            self.prompt_logprobs.tensors.append(prompt_logprobs_tensors)
        else:
            super()._update_prompt_logprobs(prompt_logprobs_tensors)

    def _form(self, given: LogprobsTensors, into: LatePromptLogprobs) -> None:
        # vLLM may have begun others since.
        kept, self.prompt_logprobs = self.prompt_logprobs, into
        super()._update_prompt_logprobs(given)
        self.prompt_logprobs = kept

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        self._of_answer = True
        super()._update_sample_logprobs(logprobs_lists)
        self._of_answer = False

    def _verify_tokens(
        self,
        decoded_tokens_list: list[str],
        tokens: list[int],
        context_token_ids: list[int] | None = None,
    ) -> list[str]:
        if not self._of_answer:
            verified: list[str] = super()._verify_tokens(
                decoded_tokens_list, tokens, context_token_ids
            )
            return verified
        texts = [
            self._text_of(token) if UNFINISHED in text else text
            for token, text in zip(tokens, decoded_tokens_list, strict=True)
        ]
        # The first is the one that was sampled, the others are what might have been.
        self._note(tokens[0], alone=decoded_tokens_list[0], text=texts[0])
        return texts

    def _text_of(self, token: int) -> str:
        text = self._decode([*self._before.tokens, *self._since, token])
        return "" if text.endswith(UNFINISHED) else self._before.answer_in(text)

    def _note(self, token: int, *, alone: str, text: str) -> None:
        if UNFINISHED not in alone:
            self._before, self._since = PromptEnd([token], alone), []
        elif not text:
            self._since.append(token)
        else:
            begun = () if self._before.is_whole else self._before.tokens
            said = [*begun, *self._since, token]
            self._before, self._since = PromptEnd(said, self._decode(said)), []

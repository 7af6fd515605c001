"""vLLM's chat endpoints, with true finish reasons, and an error where calls cannot be parsed.

vLLM makes the serving objects; :func:`correct_tool_calls` changes their classes to those here.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.renderers.chat_utils import make_tool_call_id

from loomserve.platform.front_end.engine.answers.late_logprobs import (
    Parts,
    late_logprobs,
    slices,
    with_turns,
)
from loomserve.platform.front_end.engine.answers.messages import Messages
from loomserve.platform.front_end.engine.answers.plain_chunks import (
    Completions,
    plain_chunks,
    writes_text_alone,
)
from loomserve.platform.front_end.policy.finish_reasons import End, finish_reason, is_whole
from loomserve.platform.requests.policy.logprobs import MOST_IN_A_CHUNK, most_tokens

NO_PARSER = (
    "Tools cannot be used with this model: which parser reads its calls is not known here. The "
    "operator can name one of vLLM's in models[].engine.tool_call_parser; without tools, or with "
    'tool_choice "none", the model answers.'
)
_log = logging.getLogger(__name__)

_DATA = "data: "
_TOKENIZER = 3
"""Its place among a stream's arguments, after the results."""

_WHOLE_ONLY = frozenset({"Internlm2ToolParser", "JambaToolParser"})
"""vLLM's, which find a piece of arguments at its first place in them, where it is not the last."""

Read = tuple[str, list[tuple[str, str]]]
"""What a whole text says: its content, and names and arguments of its calls."""


class _Chat(OpenAIServingChat):  # type: ignore[misc]
    """Chats with true finish reasons: vLLM says ``tool_calls`` of some calls that were cut off,
    and ``stop`` of calls of the named tool."""

    async def _create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        if _cannot_call(request, self.parser_cls):
            return self.create_error_response(NO_PARSER, param="tools")
        _hold_to_schemas(request)
        return await super()._create_chat_completion(request, raw_request)

    def chat_completion_stream_generator(
        self, request: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        of = super().chat_completion_stream_generator

        def stream(results: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
            chunks: AsyncGenerator[str, None] = of(request, results, *args, **kwargs)
            return chunks

        if not request.tools:
            if self.enable_log_outputs or not writes_text_alone(request, self.parser_cls):
                return stream(result_generator)
            return plain_chunks(stream, result_generator, empty=self.parser_cls is None)
        read = partial(self._read_whole, request, args[_TOKENIZER], kwargs)
        corrected = _CorrectedStream(
            request, read, whole=_tool_parser(self.parser_cls) in _WHOLE_ONLY
        )
        return corrected.chunks(stream(corrected.noted(result_generator)))

    def _create_chat_logprobs(
        self, token_ids: Sequence[int], top_logprobs: Sequence[Any], **options: Any
    ) -> ChatCompletionLogProbs:
        form = partial(super()._create_chat_logprobs, **options)

        def parts(given: Sequence[Any]) -> Parts:
            return (form(token_ids[some], given[some]).model_dump() for some in slices(given))

        if (late := late_logprobs.get()) is not None and late.leave(top_logprobs, parts):
            return ChatCompletionLogProbs()
        return form(token_ids, top_logprobs)

    def _read_whole(self, request: Any, tokenizer: Any, kwargs: Any, text: str) -> Read:
        template = {"chat_template_kwargs": kwargs.get("chat_template_kwargs")}
        parser = self.parser_cls(
            tokenizer, request.tools, model_config=self.model_config, **template
        )
        _, content, calls = parser.parse(text, request, enable_auto_tools=self.enable_auto_tools)
        return content or "", [(call.name, call.arguments) for call in calls or ()]

    async def chat_completion_full_generator(
        self, request: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        ends: dict[int, End] = {}
        answer = await super().chat_completion_full_generator(
            request, _noted(result_generator, ends), *args, **kwargs
        )
        for choice in getattr(answer, "choices", ()) if request.tools else ():
            calls = [each.function.arguments for each in choice.message.tool_calls or ()]
            choice.finish_reason = finish_reason(ends.get(choice.index, End()), calls)
        return answer


class _Messages(_Chat, Messages):
    """Anthropic's messages, which vLLM makes of chats."""

    def messages_full_converter(self, generator: Any) -> Any:
        for choice in generator.choices:
            for call in choice.message.tool_calls or ():
                if not is_whole(call.function.arguments):  # cut off: the input must be an object
                    call.function.arguments = "{}"
        return super().messages_full_converter(generator)


class _Responses(OpenAIServingResponses):  # type: ignore[misc]
    """Responses, which vLLM's class answers with prose where it cannot read calls."""

    async def _create_responses(self, request: Any, raw_request: Any = None) -> Any:
        if _cannot_call(request, self.parser):
            return self.create_error_response(NO_PARSER, param="tools")
        _hold_to_schemas(request)
        if request.stream and request.is_include_output_logprobs():
            # The last events of a stream say all of them again; a longer one has been refused.
            most = most_tokens(request.top_logprobs, 1, MOST_IN_A_CHUNK)
            request.max_output_tokens = request.max_output_tokens or most
        return await super()._create_responses(request, raw_request)

    def _make_response_parser(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        made = partial(super()._make_response_parser, request, *args, **kwargs)
        parser = made()
        wanted = request.tools and (request.stream or request.parallel_tool_calls is False)
        return _Calls(parser, made, request) if parser is not None and wanted else parser

    def _process_simple_streaming_events(
        self, request: Any, params: Any, contexts: AsyncIterator[Any], *args: Any
    ) -> Any:
        told = _told_ends(contexts) if request.tools else contexts
        events = super()._process_simple_streaming_events(request, params, told, *args)
        return with_turns(events) if request.is_include_output_logprobs() else events

    def _create_response_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[Any], **options: Any
    ) -> list[Any]:
        form = partial(super()._create_response_logprobs, **options)

        def parts(given: Sequence[Any]) -> Parts:
            for some in slices(given):
                made = form(token_ids=token_ids[some], logprobs=given[some])
                yield {"logprobs": [each.model_dump(mode="json") for each in made]}

        if (late := late_logprobs.get()) is not None and late.leave(logprobs, parts):
            return []
        return list(form(token_ids=token_ids, logprobs=logprobs))

    def _make_response_output_items(
        self, request: Any, final_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        items = super()._make_response_output_items(request, final_output, *args, **kwargs)
        for item in items if final_output.finish_reason == "length" else ():
            if item.type == "function_call" and not is_whole(item.arguments):
                item.status = "incomplete"
        return items


class _Calls:
    """A parser of a response's calls: all those of its whole text are streamed, or, with
    ``parallel_tool_calls`` false, the first alone."""

    def __init__(self, parser: Any, made: Callable[[], Any], request: Any) -> None:
        """``made`` makes another such parser."""
        self._parser, self._made = parser, made
        self._request = request
        self._most = 1 if request.parallel_tool_calls is False else None
        self._whole = _tool_parser(parser) in _WHOLE_ONLY
        self._answer = _Answer()
        self.end = End()
        """How the engine ended the answer, as far as it has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def parse(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        reasoning, content, calls = self._parser.parse(*args, **kwargs)
        return reasoning, content, calls and calls[: self._most]

    def parse_delta(self, **kwargs: Any) -> Any:
        delta, answer = self._parser.parse_delta(**kwargs), self._answer
        if delta and self._whole:
            delta.tool_calls = []
        elif delta and self._most is not None:
            delta.tool_calls = [call for call in delta.tool_calls if call.index < self._most]
        answer.written.append(kwargs["delta_text"])
        if kwargs["finished"] or (delta and (delta.tool_calls or not answer.shown)):
            told = delta.model_dump() if delta else {}
            answer.note(told)
            # A stream has one call at a time, and those before the last have ended.
            last = max(answer.calls, default=0)
            whole = kwargs["finished"] and self.end == End()
            if whole and answer.complete(told, self._read, self._most, last):
                return DeltaMessage.model_validate(told)
        return delta

    def _read(self, text: str) -> Read:
        _, content, calls = self._made().parse(text, self._request, enable_auto_tools=True)
        return content or "", [(call.name, call.arguments) for call in calls or ()]


async def _told_ends(contexts: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The contexts of a response's stream, whose parser is told how the engine ended it."""
    async for context in contexts:
        if (parser := context.response_parser) is not None and context.last_output is not None:
            for output in context.last_output.outputs:
                parser.end = _end_of(output) or parser.end
        yield context


_CLASSES: dict[str, Callable[..., Any]] = {
    "openai_serving_chat": _Chat,
    "openai_serving_completion": Completions,
    "openai_serving_responses": _Responses,
    "anthropic_serving_messages": _Messages,
}


def correct_tool_calls(state: Any) -> None:
    """Change the classes of vLLM's endpoints, in its app's ``state``, to those here."""
    for name, made in _CLASSES.items():
        serving = getattr(state, name, None)
        if serving is not None:
            serving.__class__ = made


def _tool_parser(parser: Any) -> str | None:
    """The name of the class that reads calls, if any does."""
    of = None if parser is None else parser.tool_parser_cls
    return None if of is None else str(of.__name__)


def _hold_to_schemas(request: Any) -> None:
    """A call that must come keeps to its tool's schema, unless the tool says that it need not."""
    if request.tool_choice in (None, "none", "auto"):
        return
    for tool in request.tools or ():
        of = getattr(tool, "function", tool)
        if getattr(of, "strict", False) is None:
            of.strict = True


def _cannot_call(request: Any, parser: Any) -> bool:
    wanted = request.tools and request.tool_choice != "none"
    return bool(wanted) and _tool_parser(parser) is None


async def _noted(results: AsyncIterator[Any], ends: dict[int, End]) -> AsyncIterator[Any]:
    """The results; ``ends`` gets how the engine ended each of a request's answers."""
    async for result in results:
        for output in result.outputs:
            if (end := _end_of(output)) is not None:
                ends[output.index] = end
        yield result


def _end_of(output: Any) -> End | None:
    """How the engine ended an answer; None: it has not."""
    if output.finish_reason is None:
        return None
    return End(output.finish_reason, isinstance(output.stop_reason, str))


@dataclass
class _Answer:
    """One of a request's answers, as far as it has been streamed."""

    written: list[str] = field(default_factory=list)
    shown: bool = False
    """Whether any of it has been sent as content or reasoning."""
    calls: dict[int, str] = field(default_factory=dict)
    """Arguments, by the number of a call."""

    def note(self, delta: Mapping[str, Any]) -> None:
        """Note what a chunk says."""
        self.shown |= bool(delta.get("content") or delta.get("reasoning"))
        for call in delta.get("tool_calls") or ():
            said = (call.get("function") or {}).get("arguments") or ""
            self.calls[call["index"]] = self.calls.get(call["index"], "") + said

    def complete(
        self, delta: dict[str, Any], read: Callable[[str], Read], most: int | None, first: int = 0
    ) -> bool:
        """Add to the last chunk what an answer that is whole has not sent yet, of its calls
        ``first`` and later, ``most`` in all; whether there is any."""
        cut = not all(map(is_whole, self.calls.values()))
        if not cut and (self.calls or self.shown):
            return False
        try:
            content, calls = read("".join(self.written))
        except Exception:
            _log.exception("the calls of an answer cannot be read")
            return False
        added = bool(content) and not self.shown
        if added:
            delta["content"] = content
        for index, (name, arguments) in enumerate(calls[first:most], first):
            said = self.calls.get(index)
            if said is None:
                head = {"id": make_tool_call_id(), "type": "function", "index": index}
                more = {**head, "function": {"name": name, "arguments": arguments}}
            elif arguments != said and arguments.startswith(said):
                more = {"index": index, "function": {"arguments": arguments[len(said) :]}}
            else:
                continue
            delta["tool_calls"] = [*(delta.get("tool_calls") or ()), more]
            self.calls[index] = arguments
            added = True
        return added


class _CorrectedStream:
    """A stream with true finish reasons, and with calls that vLLM's parser left out."""

    def __init__(self, request: Any, read: Callable[[str], Read], *, whole: bool) -> None:
        """``read`` parses an answer's whole text; ``whole``: calls are sent at the end only."""
        self._whole = whole
        self._single = request.n in {None, 1}
        self._most = 1 if request.parallel_tool_calls is False else None
        self._read = read
        self._ends: dict[int, End] = {}
        self._answers: dict[int, _Answer] = defaultdict(_Answer)

    async def noted(self, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for result in _noted(results, self._ends):
            for output in result.outputs:
                self._answers[output.index].written.append(output.text)
            yield result

    async def chunks(self, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            if '"delta":' not in chunk or self._is_more_text(chunk):
                yield chunk
                continue
            told = msgspec.json.decode(chunk.removeprefix(_DATA))
            changed = [self._take(choice) for choice in told["choices"]]
            yield f"{_DATA}{msgspec.json.encode(told).decode()}\n\n" if any(changed) else chunk

    def _is_more_text(self, chunk: str) -> bool:
        """Whether a chunk, of which there is one for each token, has nothing new."""
        known = self._single and self._answers[0].shown
        return known and '"tool_calls":[{' not in chunk and '"finish_reason":"' not in chunk

    def _take(self, choice: dict[str, Any]) -> bool:
        """Note what a chunk says of an answer; whether the chunk was changed."""
        answer, delta = self._answers[choice["index"]], choice["delta"]
        dropped = self._whole and delta.pop("tool_calls", None) is not None
        answer.note(delta)
        if choice.get("finish_reason") is None:
            return dropped
        end = self._ends.get(choice["index"], End())
        if end == End():
            answer.complete(delta, self._read, self._most)
        choice["finish_reason"] = finish_reason(end, answer.calls.values())
        return True

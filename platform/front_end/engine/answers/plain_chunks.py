"""Streams of text alone: chunks that differ in their text are filled into the first of them.

vLLM makes three pydantic objects of each token. Here it writes what begins and ends a stream, and
one chunk between, which is the template of those after it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.parser.abstract_parser import DelegatingParser

from loomserve.platform.front_end.engine.answers.deltas import Delta
from loomserve.platform.front_end.engine.answers.late_logprobs import Parts, late_logprobs, slices

Chunks = AsyncGenerator[str, None]

_TEXT = re.compile(r'"choices":\[\{"index":0,(?:"delta":\{"content":|"text":)(?=")')
# Whatever else a chunk says, such as of log probabilities or usage, differs from token to token.
_REST = re.compile(r"\}?(?:,\"[a-z_]+\":null)*\}\]\}\n\n")


class Template(NamedTuple):
    """What is around the text of a stream's chunks."""

    before: str
    after: str

    @classmethod
    def of(cls, chunk: str, text: str) -> Template | None:
        """That of a chunk with this text; None: the chunk says more, or something else."""
        found, written = _TEXT.search(chunk), encode_basestring(text)
        if found is None or not chunk.startswith(written, found.end()):
            return None
        after = chunk[found.end() + len(written) :]
        return cls(chunk[: found.end()], after) if _REST.fullmatch(after) else None

    def chunk(self, text: str) -> str:
        return f"{self.before}{encode_basestring(text)}{self.after}"


async def plain_chunks(
    stream: Callable[[AsyncIterator[Any]], Chunks], results: AsyncIterator[Any], *, empty: bool
) -> Chunks:
    """The chunks of vLLM's ``stream`` of a request's results, which are of one answer. ``empty``: a
    token without text is a chunk, too."""
    passed = _Passed(results)
    chunks = stream(passed)
    try:
        template = None
        async for chunk in chunks:
            yield chunk
            template = passed.template(chunk)
            if template is not None:
                break
        while template is not None:
            text = await passed.next_text()
            if text is None:
                template = None
            elif text or empty:
                yield template.chunk(text)
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()


class _Passed:
    """A request's results, as vLLM's stream of it gets them; some have been taken from between."""

    def __init__(self, results: AsyncIterator[Any]) -> None:
        self._results = results
        self._taken: list[int] = []
        self._next: Any = None
        """What vLLM gets next: a result, or why there is none."""
        self._last: Any = None

    def __aiter__(self) -> _Passed:
        return self

    async def __anext__(self) -> Any:
        given, self._next = self._next, None
        if isinstance(given, Exception):
            raise given
        self._last = given or await anext(self._results)
        return self._last

    def template(self, chunk: str) -> Template | None:
        """That of the chunk, if vLLM has made it of the last result."""
        outputs = _result(self._last).outputs
        return Template.of(chunk, outputs[0].text) if len(outputs) == 1 else None

    async def next_text(self) -> str | None:
        """The text of the next result; None: vLLM gets that."""
        try:
            given = await anext(self._results)
        except Exception as error:
            self._next = error
            return None
        result = _result(given)
        if type(result) is Delta and (text := result.text) is not None and _is_unicode(text):
            self._taken += result.tokens
            return text
        for output in result.outputs:
            # It counts them.
            output.token_ids = [*self._taken, *output.token_ids]
        self._taken, self._next = [], given
        return None


def _result(given: Any) -> Any:
    """A result, which has its prompt's number beside it in a stream of completions."""
    return given[1] if isinstance(given, tuple) else given


def _is_unicode(text: str) -> bool:
    """Whether it can be sent at all."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def writes_text_alone(request: Any, parser: Any) -> bool:
    """Whether a chat's stream has no more of a token than its text, by the parser of the model."""
    if request.tools or request.echo or request.n not in {None, 1}:
        return False
    return parser is None or (
        request.tool_choice == "none"
        and issubclass(parser, DelegatingParser)
        and parser.parse_delta is DelegatingParser.parse_delta
        and parser.reasoning_parser_cls is None
        and not getattr(parser.tool_parser_cls, "engine_based_streaming", False)
    )


class Completions(OpenAIServingCompletion):  # type: ignore[misc]
    """Answers ``/v1/completions``."""

    def completion_stream_generator(
        self, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Chunks:
        of = super().completion_stream_generator

        def stream(results: AsyncIterator[Any]) -> Chunks:
            chunks: Chunks = of(request, engine_inputs, results, *args, **kwargs)
            return chunks

        if len(engine_inputs) != 1 or request.n not in {None, 1}:
            return stream(result_generator)
        return plain_chunks(stream, result_generator, empty=True)

    def _create_completion_logprobs(
        self, token_ids: Sequence[int], top_logprobs: Sequence[Any], **options: Any
    ) -> CompletionLogProbs:
        form = partial(super()._create_completion_logprobs, **options)

        def parts(given: Sequence[Any]) -> Parts:
            offset = 0
            for some in slices(given):
                made = form(token_ids[some], given[some], initial_text_offset=offset)
                offset = made.text_offset[-1] + len(made.tokens[-1])
                yield made.model_dump()

        if (late := late_logprobs.get()) is not None and late.leave(top_logprobs, parts):
            return CompletionLogProbs()
        return form(token_ids, top_logprobs)

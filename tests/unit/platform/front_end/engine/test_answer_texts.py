"""What a client gets of an answer: its characters, each whole and once, and nothing of its prompt.

Two tokenizers are made here, each of whose tokens may end in the midst of a character: one of bytes
in the way of GPT-2, with tokens that end one character and begin the next, and one of SentencePiece
with bytes for what it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists

from loomserve.platform.front_end.engine.answers.texts import AnswerTexts, FastAnswer, SlowAnswer

END = "<|end|>"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Emoji alone, joined, of a colour and of two letters; scripts of three bytes a letter; an accent
# that stands alone; marks whose first bytes tokens join to a space.
PARTS = [
    *("Hello world", " secret", "!", "\U0001f30d", "\U0001f469\u200d\U0001f469\u200d\U0001f467"),
    *("\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea", "\u65e5\u672c\u8a9e\u3067\u3059"),
    *("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u00e9", "e\u0301", " \u201c", "\u20ac"),
]


def of_bytes() -> PreTrainedTokenizerFast:
    """Tokens of GPT-2's kind."""
    spell = _letters()
    words = ["Hello", " world", "\u65e5", "\u3067\u3059"]
    across = [b" \xe2\x80", b"\xac\xe8", b"\x8d\xf0\x9f", b"\x9f\x8c", b"\xf0\x9f", b"\x8d!"]
    tokens = ["".join(spell[byte] for byte in each) for each in (*map(str.encode, words), *across)]
    vocabulary = {each: number for number, each in enumerate([END, *spell.values(), *tokens])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def _letters() -> dict[int, str]:
    """The letter that byte-level tokenizers have for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    return letters | {byte: chr(256 + number) for number, byte in enumerate(others)}


def of_pieces() -> PreTrainedTokenizerFast:
    """Tokens of Llama 2's kind."""
    pieces = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"Helowrdst", "\u00e9", "\u65e5"]
    numbered = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=numbered, merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            *(decoders.Replace("\u2581", " "), decoders.ByteFallback()),
            *(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
        ]
    )
    made.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


TOKENIZERS = {"bytes": of_bytes(), "pieces": of_pieces()}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
every_kind = pytest.mark.parametrize("kind", ["fast", "slow"])
many = settings(max_examples=100, deadline=None)
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), min_size=1).map("".join)
seeds = st.integers(0, 10**6)


class Answered:
    """A request to an output processor, and what its client gets."""

    def __init__(
        self,
        name: str,
        kind: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        text: str | None = None,
        a_step: int = 1,
        ended: FinishReason = FinishReason.LENGTH,
        streams: bool = True,
        **params: Any,
    ) -> None:
        """``text``: of the prompt; ``a_step``: tokens of each output; ``ended``: by the engine."""
        self.deltas: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[str] = []
        self.of_prompt: list[str] = []
        output_kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(output_kind=output_kind, max_tokens=len(answer), **params)
        processor = AnswerTexts(TOKENIZERS[name], log_stats=False)
        with pytest.MonkeyPatch.context() as patch:
            is_fast = "vllm.v1.engine.detokenizer.uses_fast_detokenizer"
            patch.setattr(is_fast, lambda _: kind == "fast")
            processor.add_request(_request(prompt, sampling), text)
        self.state = processor.request_states["r"]
        assert isinstance(self.state.detokenizer, FastAnswer if kind == "fast" else SlowAnswer)
        for start in range(0, len(answer), a_step):
            tokens = list(answer[start : start + a_step])
            output = EngineCoreOutput("r", tokens)
            if start + a_step >= len(answer):
                output.finish_reason = ended
            if sampling.logprobs is not None:
                output.new_logprobs = _logprobs(tokens)
            for come in processor.process_outputs([output]).request_outputs:
                self._take(come.outputs[0])
        self.text = "".join(self.deltas)

    def _take(self, choice: Any) -> None:
        self.deltas.append(choice.text)
        self.tokens += choice.token_ids
        self.logprobs += [next(iter(each.values())).decoded_token for each in choice.logprobs or ()]
        self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason


def _request(prompt: Sequence[int], sampling: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="r",
    )


def _logprobs(tokens: Sequence[int]) -> LogprobsLists:
    ids = np.array(tokens).reshape(-1, 1)
    return LogprobsLists(ids, np.zeros(ids.shape), np.ones(len(tokens), dtype=int), None)


def tokens_of(name: str, text: str) -> list[int]:
    if name == "pieces" or text == END:
        return list(TOKENIZERS[name].encode(text, add_special_tokens=False))
    # The longest token each time, so that some are across characters.
    spell, known, tokens = _letters(), TOKENIZERS[name].get_vocab(), []
    left = "".join(spell[byte] for byte in text.encode())
    while left:
        size = next(size for size in range(6, 0, -1) if left[:size] in known)
        tokens.append(known[left[:size]])
        left = left[size:]
    return tokens


def text_of(name: str, tokens: Sequence[int], *, skip: bool = True) -> str:
    return str(TOKENIZERS[name].decode(list(tokens), skip_special_tokens=skip))


def parted(name: str, text: str, seed: int) -> tuple[list[int], list[int], str]:
    """Tokens of a prompt and of its answer, which is the text from its first whole character on.

    By characters, of which each tells where its tokens end: what has begun in the prompt is the
    answer's, and what has not ended in the answer nobody's.
    """
    tokens = tokens_of(name, text)
    cut = 1 + seed % max(1, len(tokens) - 1)
    end = len(tokens) - seed % 3
    of_prompt = max(_whole(name, tokens, cut), key=len)
    of_all = max(_whole(name, tokens, max(cut, end)), key=len)
    return tokens[:cut], tokens[cut : max(cut, end)], of_all[len(of_prompt) :]


def _whole(name: str, tokens: Sequence[int], end: int) -> list[str]:
    """Texts of all tokens that are whole characters of those before ``end``."""
    whole, shown = text_of(name, tokens), text_of(name, tokens[:end]).rstrip(UNFINISHED)
    begun = [text_of(name, tokens[:less]) for less in range(end + 1)]
    return [each for each in (shown, *begun) if whole.startswith(each) and UNFINISHED not in each]


@every_kind
@every_tokenizer
@many
@given(text=texts, seed=seeds, a_step=st.integers(1, 3))
def test_an_answer_is_what_its_prompt_is_not(
    text: str, seed: int, a_step: int, name: str, kind: str
) -> None:
    prompt, answer, wanted = parted(name, text.replace(UNFINISHED, ""), seed)
    if not answer:
        return
    given = (name, kind, prompt, answer)
    streamed = Answered(*given, a_step=a_step, logprobs=0)
    assert streamed.text == Answered(*given, a_step=a_step, streams=False).text == wanted
    assert streamed.tokens == answer
    # vLLM's texts of single tokens lack spaces that SentencePiece puts before words.
    told = "".join(streamed.logprobs).replace(" ", "")
    assert wanted.replace(" ", "").startswith(told)
    assert len(told) == len(wanted.replace(" ", "")) or text_of(name, answer).endswith(UNFINISHED)


@every_kind
@every_tokenizer
@many
@given(text=texts, seed=seeds, data=st.data(), includes=st.booleans(), least=st.integers(0, 4))
def test_a_stop_string_ends_an_answer_where_it_is_in_the_answer(
    text: str, seed: int, data: st.DataObject, includes: bool, least: int, name: str, kind: str
) -> None:
    prompt, answer, whole = parted(name, text.replace(UNFINISHED, ""), seed)
    if not whole:
        return
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 4))]
    how = {
        "stop": [stop],
        "include_stop_str_in_output": includes,
        "min_tokens": min(least, len(answer)),
    }
    streamed = Answered(name, kind, prompt, answer, **how)
    assert streamed.text == Answered(name, kind, prompt, answer, streams=False, **how).text
    found = whole.find(stop)
    if not least:
        assert streamed.text == whole[: found + len(stop) * includes]
    elif not includes:
        assert whole.startswith(streamed.text)


@every_kind
@every_tokenizer
def test_no_word_of_a_secret_prompt_is_in_its_answer(name: str, kind: str) -> None:
    tokens = tokens_of(name, "Hello world, this is a secret prompt \U0001f30d\U0001f31f")
    halves = [cut for cut in (-3, -2, -1) if text_of(name, tokens[:cut]).endswith(UNFINISHED)]
    assert halves
    for cut in halves:
        answered = Answered(name, kind, tokens[:cut], [*tokens[cut:], *tokens_of(name, "lost")])
        assert answered.text.replace(" ", "").lstrip("\U0001f30d") == "\U0001f31flost", cut


@every_kind
@every_tokenizer
def test_what_the_answer_does_not_finish_stays_the_prompts(name: str, kind: str) -> None:
    tokens = tokens_of(name, "Hello \U0001f30d")[:-1]
    answered = Answered(name, kind, tokens, tokens_of(name, "lost")[-4:], logprobs=0)
    assert answered.text == "".join(answered.logprobs) == "lost"


@every_kind
@every_tokenizer
def test_a_text_that_ends_with_the_mark_of_half_a_character_is_whole(name: str, kind: str) -> None:
    text = f"Hello {UNFINISHED}"
    asked = Answered(name, kind, tokens_of(name, text), tokens_of(name, "lost")[-4:], text=text)
    assert (asked.state.prompt, asked.text) == (text, "lost")


@every_kind
@every_tokenizer
@many
@given(text=texts, seed=seeds)
def test_an_echo_and_its_answer_are_the_text_of_all_tokens(
    text: str, seed: int, name: str, kind: str
) -> None:
    prompt, answer, _ = parted(name, text.replace(UNFINISHED, ""), 3 * seed)
    if answer:
        echoed = Answered(name, kind, prompt, answer, text=text_of(name, prompt, skip=False))
        assert echoed.state.prompt + echoed.text == text_of(name, [*prompt, *answer])


@every_kind
@every_tokenizer
def test_special_tokens_are_shown_or_not_after_half_a_character(name: str, kind: str) -> None:
    (end,) = tokens_of(name, END)
    tokens = tokens_of(name, "Hello \U0001f30d")
    for skip, shown in ((True, ""), (False, END)):
        answer = [tokens[-1], end, end, *tokens_of(name, "lost")[-4:]]
        answered = Answered(name, kind, tokens[:-1], answer, skip_special_tokens=skip)
        assert answered.text.replace(" ", "") == f"\U0001f30d{shown}{shown}lost"


@every_kind
def test_each_answer_to_a_prompt_finishes_its_character_in_its_own_way(kind: str) -> None:
    tokens = tokens_of("pieces", "Hello \U0001f30d")
    for last in (tokens[-1], tokens[-1] + 1):
        answered = Answered("pieces", kind, tokens[:-1], [last], logprobs=0)
        assert answered.text == text_of("pieces", [*tokens[:-1], last])[-1]
        assert answered.logprobs == [answered.text]


@every_kind
def test_a_token_that_ends_an_answer_is_not_shown(kind: str) -> None:
    tokens = tokens_of("bytes", "Hello \U0001f30d!")
    stops = Answered("bytes", kind, tokens[:2], tokens[2:-1], ended=FinishReason.STOP)
    assert UNFINISHED not in stops.text

"""The worker's half: a request that is new to this worker is resumed to everything in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from loomserve.platform.engine.resumption.travelling import resumed_tokens

Draw = Callable[[torch.Generator], None]


class ResumesRequests:
    """Part of a model runner, of vLLM's first kind, on any device.

    vLLM's runner makes the state of a new request without output tokens. Here it is made with
    those that the request has been answered with, and the request joins those that were preempted.
    Its prompt's log probabilities, if any, have been told and are not computed.
    """

    def _update_states(self: Any, scheduler_output: SchedulerOutput) -> Any:
        new = scheduler_output.scheduled_new_reqs
        going_on = [each for each in new if resumed_tokens(each.sampling_params)]
        if going_on:
            for each in going_on:
                self._know(each)
            # The scheduler, which may be in this process, keeps its own.
            scheduler_output = replace(
                scheduler_output,
                scheduled_new_reqs=[each for each in new if each not in going_on],
                scheduled_cached_reqs=_joined(scheduler_output.scheduled_cached_reqs, going_on),
            )
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _know(self: Any, new: NewRequestData) -> None:
        """Make the state of a request as if it had been here before."""
        tokens = resumed_tokens(new.sampling_params)
        state = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            prompt_embeds=new.prompt_embeds,
            prompt_is_token_ids=new.prompt_is_token_ids,
            mm_features=new.mm_features,
            sampling_params=new.sampling_params,
            pooling_params=None,
            generator=_generator(
                new.sampling_params,
                len(tokens),
                self.input_batch.vocab_size,
                self.device,
                self.sampler.topk_topp_sampler,
            ),
            block_ids=new.block_ids,
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=list(tokens),
            lora_request=new.lora_request,
        )
        self.requests[new.req_id] = state
        if self.uses_mrope:
            self._init_mrope_positions(state)


def _joined(cached: CachedRequestData, going_on: Sequence[NewRequestData]) -> CachedRequestData:
    tokens = [resumed_tokens(each.sampling_params) for each in going_on]
    names = [each.req_id for each in going_on]
    # A pipeline's first stage gets the others' last tokens; these it has.
    last = [*cached.new_token_ids, *([] for _ in going_on)] if cached.new_token_ids else []
    return CachedRequestData(
        req_ids=[*cached.req_ids, *names],
        resumed_req_ids={*cached.resumed_req_ids, *names},
        new_token_ids=last,
        all_token_ids={
            **cached.all_token_ids,
            **{
                each.req_id: [*(each.prompt_token_ids or ()), *so_far]
                for each, so_far in zip(going_on, tokens, strict=True)
            },
        },
        new_block_ids=[*cached.new_block_ids, *(each.block_ids for each in going_on)],
        num_computed_tokens=[
            *cached.num_computed_tokens,
            *(each.num_computed_tokens for each in going_on),
        ],
        num_output_tokens=[*cached.num_output_tokens, *map(len, tokens)],
    )


def _generator(
    params: SamplingParams,
    draws: int,
    vocabulary: int,
    device: torch.device,
    sampler: TopKTopPSampler,
) -> torch.Generator | None:
    """The generator of a seeded request that has drawn so many tokens; None if it has none."""
    if params.sampling_type is not SamplingType.RANDOM_SEED:
        return None
    generator = torch.Generator(device=device)
    generator.manual_seed(params.seed)
    if device.type == "cuda":
        noise = torch.empty(vocabulary, dtype=torch.float32, device=device)
        noise.exponential_(generator=generator)
        generator.set_offset(draws * generator.get_offset())
        return generator
    draw = quickest_draw(vocabulary, sampler)
    for _ in range(draws):
        draw(generator)
    return generator


@cache
def quickest_draw(vocabulary: int, sampler: TopKTopPSampler) -> Draw:
    """What moves a generator on as a token does on a CPU, in the least time. vLLM draws a single
    integer, but noise for each token of the vocabulary where it samples in float64."""
    logits, integer = torch.zeros(1, vocabulary), torch.empty(1, dtype=torch.int64)

    def as_vllm(generator: torch.Generator) -> None:
        sampler(logits.clone(), {0: generator}, None, None)

    def by_integer(generator: torch.Generator) -> None:
        integer.random_(0, 2**31, generator=generator)

    return by_integer if torch.equal(_after_some(by_integer), _after_some(as_vllm)) else as_vllm


def _after_some(draw: Draw) -> torch.Tensor:
    generator = torch.Generator()
    generator.manual_seed(0)
    for _ in range(3):
        draw(generator)
    return generator.get_state()

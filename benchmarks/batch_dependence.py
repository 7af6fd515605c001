"""How many greedy answers depend on which other requests are computed in the same steps?

Stock vLLM on one core answers the same requests one at a time, a few at a time, and all at once, in
each number format. A matrix product of one row may sum in another order than one of many; where a
format keeps few digits, that turns tokens. What any mechanism changes must be seen against this:
it changes who is computed with whom. The last line of the output is one JSON object.

Run it as ``python -m benchmarks.batch_dependence`` or ``make bench-batch-dependence``.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from benchmarks.engine import block_bytes, offline_engine
from benchmarks.result_files import machine, publish, said_by
from loomserve.platform.models import catalog

FORMATS = ("float32", "bfloat16")
PROMPT_TOKENS = (10, 60)
BLOCKS = 400


def answers(llm: Any, prompts: list[list[int]], tokens: int, at_once: int) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [
        list(output.outputs[0].token_ids)
        for begin in range(0, len(prompts), at_once)
        for output in llm.generate(
            [TokensPrompt(prompt_token_ids=one) for one in prompts[begin : begin + at_once]],
            greedy,
            use_tqdm=False,
        )
    ]


def different(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def measure(args: argparse.Namespace, dtype: str) -> dict[str, int]:
    """Answers that differ from those of all requests at once."""
    source = random.Random(args.seed)
    prompts = [
        [source.randrange(1000, 40000) for _ in range(source.randint(*PROMPT_TOKENS))]
        for _ in range(args.requests)
    ]
    llm = offline_engine(
        str(catalog.resolve("demo", Path.cwd())),
        None,
        dtype=dtype,
        max_model_len=PROMPT_TOKENS[1] + args.tokens + 1,
        max_num_seqs=args.requests,
        kv_cache_memory_bytes=BLOCKS * block_bytes(dtype),
        enable_prefix_caching=False,
    )
    together = answers(llm, prompts, args.tokens, args.requests)
    found = {
        name: different(answers(llm, prompts, args.tokens, at_once), together)
        for name, at_once in (("all_again", args.requests), ("seven", 7), ("one", 1))
    }
    print(f"{dtype}, of {args.requests} answers differ: {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    facts = machine()
    figures = {
        **{f"differ_in_{dtype}": measure(args, dtype) for dtype in FORMATS},
        "of": args.requests,
        "runs": 1,
    }
    publish("batch_dependence", figures, setup=said_by(args), facts=facts)


if __name__ == "__main__":
    main()

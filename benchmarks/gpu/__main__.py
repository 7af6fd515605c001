"""``make gpu-check``: run the steps that the variables choose.

``OUT`` is the folder of results, ``BUDGET`` the seconds after which no step begins that may not
end within them, ``STEPS`` names of steps with commas between. Without a GPU each step runs what it
can: kernels are interpreted or compiled, and nothing is timed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.gpu.runner import Step, run

STEPS = (
    Step("compile", 60),
    Step("probe", 60),
    Step("flags", 90),
    Step("kernels", 120),
    Step("store", 120),
    Step("pages", 60),
    Step("lend", 180),
    Step("processes", 120, ("torch", "triton", "msgspec")),
    Step("engines", 240, ("torch", "triton", "vllm")),
    Step("serve", 240, ("torch", "triton", "vllm")),
    Step("graphs", 240, ("torch", "triton", "vllm")),
    Step("platform", 420, ("torch", "triton", "vllm", "ray", "openai")),
)


def main() -> int:
    out = Path(os.environ.get("OUT") or "benchmarks/results/gpu")
    budget = float(os.environ.get("BUDGET") or 600)
    names = [name for name in os.environ.get("STEPS", "").split(",") if name]
    unknown = set(names) - {step.name for step in STEPS}
    if unknown:
        there = ", ".join(step.name for step in STEPS)
        print(f"STEPS: there is no {', '.join(sorted(unknown))}, but {there}")
        return 2
    chosen = [step for step in STEPS if not names or step.name in names]
    outcomes = run(chosen, out, budget)
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

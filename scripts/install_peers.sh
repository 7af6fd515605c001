#!/usr/bin/env bash
# Makes .venv-peers with what `make bench-peers` measures beside Loomserve: vllm-router and LiteLLM, and under
# .venv-peers/ray what Ray Serve LLM needs beyond .venv. Nothing of Loomserve's imports any of it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

peers=(vllm-router==0.1.17 'litellm[proxy]==1.108.7')
of_ray=(pyarrow==26.0.1 pandas==3.1.1)
stamp=.venv-peers/install.stamp
asked=$(printf '%s\n' "$PWD" "${peers[@]}" "${of_ray[@]}")
[[ -f $stamp && $(<"$stamp") == "$asked" ]] && exit 0

rm -rf .venv-peers
.venv/bin/python -m venv .venv-peers
.venv/bin/uv pip install --quiet --python .venv-peers/bin/python --compile-bytecode "${peers[@]}"
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --target .venv-peers/ray "${of_ray[@]}"
printf '%s\n' "$asked" >"$stamp"

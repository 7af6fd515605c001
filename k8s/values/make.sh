#!/usr/bin/env bash
# Makes each folder's derived.yaml of its config.yaml, and what the chart has of the pods'
# environment. Weights need not be on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
loomserve=${LOOMSERVE:-../../.venv/bin/loomserve}
for folder in */; do
    "$loomserve" kube values "$folder/config.yaml" --weights smollm2-135m=270MB \
        --weights qwen3-8b=16.4GB --weights qwen3-32b=65.6GB >"$folder/derived.new"
    mv "$folder/derived.new" "$folder/derived.yaml"
done
"$loomserve" kube env >../chart/files/environment.yaml

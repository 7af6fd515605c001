#!/usr/bin/env bash
# Checks a built image: IMAGE, loomserve:VERSION-cpu by default. With MODEL, a folder of weights (the
# demo model's of this machine by default), it also serves examples/laptop.yaml on PORT (8765), and
# says how long the first answer took.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source image/tool.sh

tool=$(image_tool) || { echo "check: skipped, $NO_TOOL."; exit 0; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
ray=$(sed -n 's/^rayVersion: "\(.*\)"/\1/p' k8s/chart/values.yaml)
image=${IMAGE:-localhost/loomserve:$version-cpu}
model=${MODEL:-${LOOMSERVE_HOME:-$HOME/.cache/loomserve}/models/smollm2-135m}
port=${PORT:-8765}
kind=()
[[ $tool != buildah ]] || kind=(--type image)
"$tool" inspect "${kind[@]}" "$image" >/dev/null 2>&1 || fail "there is no image $image; make image builds it."

folder=$(mktemp -d)
chmod 755 "$folder"
served=
stop() {
    [[ -z $served ]] || { kill -TERM "$served" 2>/dev/null; wait "$served"; }
}
clean() {
    stop || true
    rm -rf "$folder"
    [[ -z ${CONTAINER:-} ]] || buildah rm "$CONTAINER" >/dev/null
}
trap clean EXIT
# A copy of the whole image, where buildah's storage has no layers: one is enough.
[[ $tool != buildah ]] || export CONTAINER=$(buildah from --pull-never "$image")

echo "Checking $image with $tool"
failed=0
image/run.sh "$image" --volume="$PWD/k8s/values/node-cpu/config.yaml:/etc/loomserve/config.yaml:ro" \
    bash -c "$(<image/inside.sh)" inside.sh "$version" "$ray" || failed=1
case $tool in
    buildah) history=$(buildah inspect --type image --format '{{range .Docker.History}}{{println .CreatedBy}}{{end}}{{.Docker.Config.Env}}' "$image") ;;
    *) history=$("$tool" history --no-trunc --format '{{.CreatedBy}}' "$image") ;;
esac
! grep -iE '://|token|password|index.url' <<<"$history" || fail "its history tells more than it should"
echo "  its history tells no addresses or secrets ... ok"

if [[ ! -f $model/config.json ]]; then
    echo "check: not served, as there is no model in $model; make serve makes it, or MODEL=FOLDER names another."
    exit "$failed"
fi
# Readable for the image's user, which the cache of this one's is not.
cp -rL "$model" "$folder/model"
chmod -R a+rX "$folder"
sed "s|port: 8000|port: $port|; s|source: demo|source: /models/model|" examples/laptop.yaml >"$folder/config.yaml"
image/run.sh "$image" --volume="$folder/config.yaml:/etc/loomserve/config.yaml:ro" --volume="$folder/model:/models/model:ro" \
    bash -c 'date +%s.%N; exec loomserve serve /etc/loomserve/config.yaml' >"$folder/log" 2>&1 &
served=$!
question='{"model": "smollm2-135m", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 16}'
until answer=$(curl -fsS "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' -d "$question" 2>/dev/null); do
    kill -0 "$served" 2>/dev/null || fail "it ended: $(tail -n 20 "$folder/log")"
    sleep 0.2
done
took=$(awk "BEGIN { printf \"%.1f\", $(date +%s.%N) - $(head -n 1 "$folder/log") }")
grep -q "Paris" <<<"$answer" || fail "it answered $answer"
echo "  it serves examples/laptop.yaml, and the first answer came $took s after the start ... ok"
stop || fail "it ended with code $?: $(tail -n 20 "$folder/log")"
served=
echo "  it ends on SIGTERM ... ok"
exit "$failed"

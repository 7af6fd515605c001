#!/usr/bin/env bash
# Runs a command in the image as the chart's pods do: uid 10001, no capabilities, a root file system
# that cannot be written. Usage: image/run.sh IMAGE [--volume=FROM:TO:ro]... COMMAND...
# It has this machine's network, and the folders that the image declares, empty.
# CONTAINER: a working container of buildah's that was made of the image, instead of a new one.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/tool.sh"

tool=$(image_tool) || fail "$NO_TOOL."
image=$1
shift
volumes=()
while [[ ${1:-} == --volume=* ]]; do
    volumes+=("$1")
    shift
done

if [[ $tool != buildah ]]; then
    exec "$tool" run --rm --read-only --user 10001:10001 --cap-drop ALL --security-opt no-new-privileges \
        --network host --shm-size 4g "${volumes[@]}" "$image" "$@"
fi

# buildah's own run is for builds, whose root can be written: the file system is entered without it.
[[ $(id -u) == 0 ]] || fail "with buildah this needs root; use podman or docker."
container=${CONTAINER:-}
if [[ -z $container ]]; then
    container=$(buildah from --pull-never "$image")
    trap 'buildah rm "$container" >/dev/null' EXIT
fi

# told FORMAT: lines of what the image's configuration says.
told() {
    buildah inspect --format "$1" "$container" | grep .
}
mapfile -t environment < <(told '{{range .OCIv1.Config.Env}}{{println .}}{{end}}')
mapfile -t entry < <(told '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}')
mapfile -t folders < <(told '{{range $folder, $_ := .OCIv1.Config.Volumes}}{{println $folder}}{{end}}')

unshare --mount --pid --fork --kill-child "$here/enter.sh" "$(buildah mount "$container")" \
    "${folders[@]/#/--folder=}" "${volumes[@]}" "${environment[@]}" "${entry[@]}" "$@" &
entered=$!
# The signal is the command's, as with podman and docker.
trap 'pkill -TERM --parent "$entered"' TERM INT
while code=0 && { wait "$entered" || code=$?; } && kill -0 "$entered" 2>/dev/null; do :; done
exit "$code"

#!/usr/bin/env bash
# Builds the container image of this checkout.
# DEVICE=cpu (the default) or DEVICE=cuda; IMAGE is its name, loomserve:VERSION-DEVICE by default.
# IMAGE_BASE: another base than the Containerfile's.
# IMAGE_OPTIONS: more options of the build, such as --secret=id=pip,src=/etc/pip.conf.
# IMAGE_TOOL: podman, buildah or docker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source image/tool.sh

device=${DEVICE:-cpu}
[[ $device =~ ^(cpu|cuda)$ ]] || fail "DEVICE is '$device'; set it to cpu or cuda."
tool=$(image_tool) || fail "$NO_TOOL."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image=${IMAGE:-localhost/loomserve:$version-$device}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || revision+=-changed

options=(--file image/Containerfile --target "$device" --tag "$image")
options+=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
[[ -z ${IMAGE_BASE:-} ]] || options+=(--build-arg "BASE=$IMAGE_BASE")
# Kubernetes takes both formats; registries that are older than OCI's take this one only.
[[ $tool == docker ]] || options+=(--format docker)

begin=$SECONDS
# Unquoted, as these are several.
"$tool" build "${options[@]}" ${IMAGE_OPTIONS:-} .
size=$("$tool" images --format '{{.Size}}' "$image")
echo "Built $image ($size) with $tool in $((SECONDS - begin)) s. Next: make check-image IMAGE=$image"

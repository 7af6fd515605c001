#!/usr/bin/env bash
# Makes a base for the image where no registry can be reached: a root of Debian's packages, named
# localhost/debian:SUITE, for IMAGE_BASE. Needs root, mmdebstrap and buildah.
# SUITE: Debian's release, bookworm by default. MIRROR: where its packages are, else Debian's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
IMAGE_TOOL=buildah
source image/tool.sh

suite=${SUITE:-bookworm}
command -v mmdebstrap >/dev/null || fail "there is no mmdebstrap (Debian, Ubuntu: apt install mmdebstrap)."
image_tool >/dev/null || fail "$NO_TOOL."
((EUID == 0)) || fail "run it as root, which a root file system belongs to."

root=$(mktemp --suffix=.tar)
trap 'rm -f "$root"' EXIT
mmdebstrap --quiet --variant=minbase --include=ca-certificates "$suite" "$root" ${MIRROR:+"$MIRROR"}
container=$(buildah from scratch)
trap 'rm -f "$root"; buildah rm "$container" >/dev/null' EXIT
buildah add --quiet "$container" "$root" / >/dev/null
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
buildah commit --quiet --format docker "$container" "localhost/debian:$suite" >/dev/null
echo "Made localhost/debian:$suite. Next: make image IMAGE_BASE=localhost/debian:$suite IMAGE_OPTIONS=--isolation=chroot"

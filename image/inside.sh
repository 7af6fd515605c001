#!/usr/bin/env bash
# Part of check.sh: what is checked within the image, where it runs by bash -c. Each line is what
# should be, what a command's output has then, and the command.
# Usage: inside.sh VERSION RAY_VERSION
set -uo pipefail
version=$1 ray=$2 failed=0

expect() {
    local what=$1 pattern=$2 said
    said=$("${@:3}" 2>&1)
    if grep -qE "$pattern" <<<"$said"; then
        echo "  $what ... ok"
    else
        echo "  $what ... failed, there is no '$pattern' in: $said"
        failed=1
    fi
}

# found FIND_EXPRESSION...: files of the image itself, one a line, between brackets.
found() {
    echo "[$(find / -xdev "$@" 2>/dev/null)]"
}

expect "it is version $version" "^loomserve ${version//./\\.}$" loomserve --version
expect "it checks a configuration" "all is well" loomserve config check /etc/loomserve/config.yaml
expect "it runs as user 10001" "^uid=10001.* gid=10001.* groups=10001" id
expect "Ray $ray is on bash's PATH, as KubeRay starts it" "ray, version ${ray//./\\.}" bash -c "ulimit -n 1024; ray --version"
expect "it is on a login shell's PATH too" "^/opt/loomserve/bin/ray" bash -lc "command -v ray"
expect "there is a C++ compiler" "^g\+\+" g++ --version
expect "lending's ring was compiled, and loads" "^/opt/loomserve/share/loomserve/native" \
    python -c "from loomserve.platform.lending.ring import native; native.load(); print(native.target())"
expect "its root cannot be written" "Read-only file system" touch /opt/loomserve/written
expect "nothing else of the image can" "^\[\]$" found -writable ! -type l ! -path /tmp ! -path /var/lib/loomserve
expect "what it declares can" "^written$" bash -c \
    'for folder in /tmp /var/lib/loomserve /dev/shm; do mkdir -p $folder/a/b || exit; done; echo written'
expect "no weights are in it" "^\[\]$" found -type f -size +20M \
    '(' -name '*.safetensors' -o -name '*.gguf' -o -name '*.pth' -o -name '*.onnx' ')'
expect "no settings of the build or secrets are in it" "^\[\]$" found -size +0 \
    '(' -name pip.conf -o -name uv.toml -o -name .netrc -o -name .git -o -name admin-token -o -name 'id_rsa*' \
    -o -name 'install.log' -o -path '/root/.cache*' -o -path '/src*' ')'
expect "its bill of materials has Python's packages and Debian's" "pkg:deb.*pkg:pypi/ray@${ray//./\\.}" \
    bash -c 'tr "\n" " " </opt/loomserve/sbom.json'
exit "$failed"

#!/usr/bin/env bash
# Makes .venv with everything Loomserve needs at the versions of constraints.txt, and the
# files whose hashes hashes.txt has. Needs no root.
# DEVICE=cpu (the default) or DEVICE=cuda. A second run with nothing changed does nothing.
# PURPOSE=serve copies the code and leaves out what only developers need; VENV is another folder
# than .venv. The container image is made so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=${DEVICE:-cpu}
purpose=${PURPOSE:-develop}
venv=${VENV:-$PWD/.venv}
log=$venv/install.log
stamp=$venv/install.stamp

fail() {
    printf 'install: %s\n' "$1" >&2
    exit 1
}

case $device in
    cpu) needed_gb=6 ;;
    cuda) needed_gb=16 ;;
    *) fail "DEVICE is '$device'; set it to cpu or cuda." ;;
esac
case $purpose in
    develop) what=(--editable ".[$device,audio,dev]") ;;
    serve) what=(".[$device]") ;;
    *) fail "PURPOSE is '$purpose'; set it to develop or serve." ;;
esac

# The folder belongs to the fingerprint because a venv does not survive being moved.
fingerprint=$(printf '%s\n' "$device" "$purpose" "$PWD" |
    cat - pyproject.toml constraints.txt hashes.txt overrides.txt |
    sha256sum | cut -d' ' -f1)

# Of an editable installation, whose files change. Ray's processes write no bytecode: each would
# compile what it imports.
compile_own() {
    [[ $purpose == serve ]] ||
        "$venv/bin/python" -m compileall -qq platform deployments kvstore routers || true
}

if [[ -x $venv/bin/loomserve && -f $stamp && $(<"$stamp") == "$fingerprint" ]]; then
    compile_own
    exit 0
fi

[[ $(uname -s) == Linux && $(uname -m) =~ ^(x86_64|aarch64)$ ]] ||
    fail "$(uname -s) on $(uname -m) is not supported; use Linux on x86_64 or aarch64."
command -v g++ >/dev/null ||
    fail "there is no C++ compiler, which vLLM needs while it runs; install g++ (Debian, Ubuntu: apt install g++)."

# A second `make install` in this folder waits for the first, then looks again.
exec 9<"$PWD"
if ! flock --nonblock 9; then
    echo "install: waiting for another installation in this folder"
    flock 9
    exec scripts/install.sh
fi

python=
for candidate in python3.12 python3.11 python3.13 python3; do
    # Running it is the test: version managers leave commands on PATH that only print an error.
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
        >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || fail "there is no Python 3.11, 3.12 or 3.13 on PATH; install one of them."
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    fail "$python cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install $python-venv)."

held_kb=$(du -sk "$venv" 2>/dev/null | cut -f1 || true)
free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
((free_kb + ${held_kb:-0} >= needed_gb * 1024 * 1024)) ||
    fail "there are $((free_kb / 1024 / 1024)) GB free in $PWD and $needed_gb GB are needed; make room."

# An environment that was moved, or whose Python is gone, is made anew.
if ! "$venv/bin/python" -c '' 2>/dev/null || ! grep -qF "$venv" "$venv/bin/activate"; then
    rm -rf "$venv"
fi
mkdir -p "$venv"
rm -f "$stamp"
: >"$log"

# progress LABEL PID: shows what the installer with this id does, until it ends or this is killed:
# on a terminal the log's last line, else how long it has been at it.
progress() {
    local begin=$SECONDS next=15
    while sleep 1 >/dev/null 2>&1 && kill -0 "$2" 2>/dev/null; do
        if [[ -t 1 ]]; then
            printf '\r\033[K  %s ... %d s: %.60s' "$1" $((SECONDS - begin)) \
                "$(tail -n 1 "$log" | tr -cd '[:print:]')"
        elif ((SECONDS - begin >= next)); then
            printf '%d s ... ' $((SECONDS - begin))
            next=$((next + 15))
        fi
    done
}

# step LABEL COMMAND...: runs it with its output in the log, and says how long it took.
step() {
    local label=$1 begin=$SECONDS status=0 shown
    shift
    printf '  %s ... ' "$label"
    printf '\n==> %s\n' "$*" >>"$log"
    progress "$label" $$ 9<&- &
    shown=$!
    "$@" >>"$log" 2>&1 || status=$?
    kill "$shown" && wait "$shown" 2>/dev/null || true
    [[ ! -t 1 ]] || printf '\r\033[K  %s ... ' "$label"
    if ((status == 0)); then
        printf 'done (%d s)\n' $((SECONDS - begin))
    else
        printf 'failed (%d s)\n' $((SECONDS - begin))
        return 1
    fi
}

give_up() {
    tail -n 15 "$log" >&2
    if grep -qE 'No space left on device|os error 28' "$log"; then
        fail "the disk is full; make room and run make install again."
    elif grep -qiE 'name resolution|name or service not known|failed to establish a new connection|dns error|connection refused|network is unreachable|error sending request|connect error|timed out|from versions: none' "$log"; then
        fail "the package index cannot be reached; connect to the network (or set PIP_INDEX_URL and UV_DEFAULT_INDEX to a mirror) and run make install again."
    elif grep -qE 'Hash mismatch|DO NOT MATCH THE HASHES' "$log"; then
        fail "a package is another file than the one that hashes.txt knows; take it from the public index (unset PIP_INDEX_URL and UV_DEFAULT_INDEX), and look into it if it still is."
    fi
    fail "the step above failed; $log has all of its output."
}

uv() {
    "$venv/bin/uv" pip "$1" --python "$venv/bin/python" "${@:2}"
}

install_uv() {
    # Its entry is its line and all that is indented below it.
    "$venv/bin/python" -m pip install --require-hashes \
        --requirement <(sed -n '/^uv==/,/[^\\]$/p' hashes.txt)
}

# Only torch itself has no hash here: each index has builds of its own. What torch needs comes with
# the rest.
install_cpu_torch() {
    local torch
    torch=$(sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)
    # First by pip's own configuration, where an administrator may have put a mirror.
    "$venv/bin/python" -m pip install --no-deps "$torch+cpu" ||
        uv install --torch-backend cpu --no-deps "$torch"
}

install_loomserve() {
    local overrides=()
    [[ $device == cuda ]] || overrides=(--override overrides.txt)
    # Gateways and engines are processes that import vLLM, and Ray's processes write no bytecode.
    # uv checks a file against the hashes of its constraint.
    uv install "${overrides[@]}" --compile-bytecode --constraint constraints.txt --constraint hashes.txt \
        --build-constraint constraints.txt --build-constraint hashes.txt "${what[@]}"
}

echo "Installing Loomserve for $device in ${venv#"$PWD/"} (details: ${log#"$PWD/"})"
step "Python environment ($("$python" --version))" "$python" -m venv "$venv" || give_up
step "uv" install_uv || give_up
if [[ $device == cpu ]]; then
    step "PyTorch for CPU" install_cpu_torch || give_up
fi
step "Loomserve, vLLM, Ray and tools" install_loomserve || give_up
# Not in the installing user's cache, where nobody else would find it.
[[ $purpose == develop ]] || export LOOMSERVE_HOME=$venv/share/loomserve
step "Task ring of lending, in C++" "$venv/bin/python" -m loomserve.platform.lending.ring.native ||
    echo "    Models will not lend to each other; $log says why."
compile_own
printf '%s\n' "$fingerprint" >"$stamp"
echo "Installed in $SECONDS s. Next: make serve"

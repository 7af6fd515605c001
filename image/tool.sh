# Sourced by the scripts beside it: which of buildah, podman and docker is used.
# IMAGE_TOOL=buildah, podman or docker chooses; else it is the first that works here.

fail() {
    printf '%s: %s\n' "$(basename "$0" .sh)" "$1" >&2
    exit 1
}

# Prints its name; 1 if there is none.
image_tool() {
    local tool
    for tool in ${IMAGE_TOOL:-podman buildah docker}; do
        # docker's client is of no use without its daemon.
        if command -v "$tool" >/dev/null && "$tool" version >/dev/null 2>&1; then
            echo "$tool"
            return
        fi
    done
    return 1
}

NO_TOOL="there is no ${IMAGE_TOOL:-podman, buildah or docker} that works here; install one of podman, buildah (Debian, Ubuntu: apt install buildah) and docker with its daemon running"

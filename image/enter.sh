#!/usr/bin/env bash
# Part of run.sh, in a mount namespace of its own: makes ROOT the root, not to be written but for
# /dev/shm and the folders, and becomes the command.
# Usage: enter.sh ROOT [--folder=PATH]... [--volume=FROM:TO:ro]... [NAME=VALUE]... COMMAND...
set -euo pipefail
root=$1
shift

mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=4g tmpfs "$root/dev/shm"
while [[ $1 == --* ]]; do
    value=${1#*=}
    if [[ $1 == --folder=* ]]; then
        owner=$(stat --format mode=%a,uid=%u,gid=%g "$root$value")
        mount -t tmpfs -o "$owner" tmpfs "$root$value"
    else
        IFS=: read -r from to _ <<<"$value"
        if [[ -d $from ]]; then
            mkdir -p "$root$to"
        else
            mkdir -p "$(dirname "$root$to")"
            touch "$root$to"
        fi
        mount --bind "$from" "$root$to"
        mount -o remount,bind,ro "$root$to"
    fi
    shift
done
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid 10001 --regid 10001 --clear-groups --inh-caps=-all --bounding-set=-all \
    --no-new-privs env -i "$@"

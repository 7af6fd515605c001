"""The token of a cluster, which permits its holder to run code on all nodes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder

_LEAST_CHARACTERS = 32


def token_path(given: Path | None) -> Path:
    """The file that holds it; ``given``: None, the one in the user's cache folder."""
    return given.expanduser().absolute() if given is not None else cache_folder() / "cluster-token"


def read_token(path: Path) -> str:
    """The token. StartError: there is none, it is too short, or others can read it."""
    try:
        token = path.read_text().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise StartError(
            f"cannot read the cluster's token ({path}: {error.strerror}): copy the file from the "
            "head, where loomserve node --head has made it, or say where it is"
        ) from None
    if mode & 0o077:
        raise StartError(
            f"{path} holds the cluster's token, by which code can be run on all nodes, and others "
            f"can read it: chmod 600 {path}"
        )
    if len(token) < _LEAST_CHARACTERS:
        raise StartError(
            f"the cluster's token in {path} is shorter than {_LEAST_CHARACTERS} characters: remove "
            "the file on the head, which then makes a better one"
        )
    return token


def read_or_make_token(path: Path) -> str:
    """The token, which the head makes if there is none yet; raises as :func:`read_token`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise StartError(f"cannot write the cluster's token to {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return read_token(path)

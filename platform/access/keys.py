"""Makes API keys, hashes them, and recognises a client's key."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from loomserve.platform.base.errors import Unauthorized
from loomserve.platform.config import ApiKey


def new_key() -> tuple[str, str]:
    """Make a key and its hash. The key is shown once; only the hash is kept."""
    key = "lsk-" + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """Hash a key as the configuration keeps it: ``sha256:HEX``.

    Keys are 256 random bits, so nobody can guess one from its hash, however fast the hash is.
    Slow, salted hashes protect passwords that people choose; here they would only cost time on
    every request.
    """
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Set of keys that give access, such as all API keys, or the admin token alone.

    ``what`` names them in errors.
    """

    def __init__(self, keys: tuple[ApiKey, ...], *, what: str = "API key") -> None:
        self._keys = keys
        self._what = what

    def identify(self, presented: str | None) -> ApiKey | None:
        """Find the key that a client presented; None: the ring is empty, and anyone may enter.

        Raises:
            Unauthorized: no key was presented, or the ring does not have it.
        """
        if not self._keys:
            return None
        if not presented:
            raise Unauthorized(
                f"No {self._what} was given. Send it in the header 'Authorization: Bearer ...'."
            )
        digest = hash_key(presented)
        found = None
        # Every key is compared, each in constant time, so the time tells an attacker nothing.
        for key in self._keys:
            if hmac.compare_digest(digest, key.hash):
                found = key
        if found is None:
            raise Unauthorized(
                f"This {self._what} is not known here. Check that it was copied whole, or ask "
                "the operator for a new one."
            )
        return found

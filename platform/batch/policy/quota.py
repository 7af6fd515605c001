"""Quotas: how much of the lane one key may take, and all keys together."""

from __future__ import annotations

from dataclasses import dataclass

from loomserve.platform.base.errors import BodyTooLarge, TooManyRequests

# A guess at when one of many batches will have ended.
_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class BatchQuota:
    """Most bytes of a key's files (answers among them), batches of a key that have not ended, and
    lines of all such batches."""

    bytes_per_key: int
    batches_per_key: int
    unended_lines: int

    def check_bytes(self, count: int) -> None:
        """Raises BodyTooLarge if a key's files would have so many bytes."""
        if count > self.bytes_per_key:
            raise BodyTooLarge(
                f"With this file your key's files would have more than {self.bytes_per_key} bytes, "
                "answers of batches among them. Delete files that you no longer need, or ask the "
                "operator to raise batch.max_bytes_per_key.",
                param="file",
                reason="file_quota_exceeded",
            )

    def check_batches(self, unended: int, lines: int) -> None:
        """Raises TooManyRequests if a key's ``unended`` batches, or all keys' ``lines``, leave no
        room."""
        if unended >= self.batches_per_key:
            raise TooManyRequests(
                f"Your key has {unended} batches that have not ended. Wait for one to end or "
                "cancel one, or ask the operator to raise batch.max_batches_per_key.",
                reason="too_many_batches",
                retry_after_s=_RETRY_AFTER_S,
            )
        if lines >= self.unended_lines:
            raise TooManyRequests(
                f"{lines} lines of batches wait already. Wait for batches to end, or ask the "
                "operator to raise batch.max_unended_lines.",
                reason="too_many_lines",
                retry_after_s=_RETRY_AFTER_S,
            )

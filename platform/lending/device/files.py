"""Files beside a ring by which its ends open each other's memory."""

from __future__ import annotations

from pathlib import Path


def task_file(ring: Path) -> Path:
    """Of what the lender made."""
    return ring.with_name(f"{ring.name}.task")


def answer_file(ring: Path) -> Path:
    """Of what the borrower made."""
    return ring.with_name(f"{ring.name}.answer")

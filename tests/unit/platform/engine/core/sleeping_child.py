"""A child of a fork server that sleeps, or becomes what it is told."""

from __future__ import annotations

import os
import time


def main(descriptor: int, *command: str) -> None:
    if command:
        os.execvp(command[0], command)
    time.sleep(600)

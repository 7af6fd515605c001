"""What holds for all tests."""

import os

from hypothesis import settings

# Processes that run tests side by side have a width, which changes what commands print.
os.environ.pop("COLUMNS", None)

# A busy machine must not fail a test: none is timed. What is checked before a merge is the same
# each time; who works on it looks for more.
settings.register_profile("untimed", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("untimed")

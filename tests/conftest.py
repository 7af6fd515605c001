"""What holds for all tests."""

import os

from hypothesis import settings

# Processes that run tests side by side have a width, which changes what commands print.
os.environ.pop("COLUMNS", None)

# A busy machine must not fail a test: none is timed.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

"""Tests of all parts; what their processes need before they import anything."""

import os

# Several run side by side: threads that wait for each other spin on the cores of all. Ray gives its
# workers the same.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

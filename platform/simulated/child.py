"""The main module of a simulated engine's process: ``python -m …child CONTROL_SOCKET PARENT``."""

from __future__ import annotations

import sys

from setproctitle import setproctitle

from loomserve.platform.engine.core.control import be_engine
from loomserve.platform.run.fate import end_with
from loomserve.platform.simulated.core import SimulatedCore

if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    setproctitle("EngineCore (simulated)")
    be_engine(int(sys.argv[1]), SimulatedCore, SimulatedCore.run)

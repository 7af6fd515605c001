"""The `loomserve` command, one file a capability."""

import os
import signal
import sys

# Its modules take seconds to import, in which Ctrl-C is to end it as SIGTERM does.
IS_COMMAND = os.path.basename(sys.argv[0]) == "loomserve"
if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

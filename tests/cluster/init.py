"""Process 1 of a node: it reaps whoever ends without a parent, as the init of a real machine does.

A process that is not reaped still has its id, by which others take it for alive.
"""

import os
import time


def main() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.05)


if __name__ == "__main__":
    main()

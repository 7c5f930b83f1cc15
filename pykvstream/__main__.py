"""The command ``pykvstream``, also as ``python -m pykvstream``.

Order: the guard against Ctrl-C stands before anything large is imported, and again when all is done: an interrupt in
the middle of an import, or of the interpreter's end, would show a traceback or become another error.
Holds: ``run``.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def run() -> int:
    """Run the command line of this process; returns the exit code."""
    obeys_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if obeys_interrupts:
        signal.signal(signal.SIGINT, _leave)
    from pykvstream.cli import main

    try:
        if obeys_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main()
        if obeys_interrupts:
            signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _leave(_: int, __: FrameType | None) -> None:
    """Nothing has begun, or everything is written: there is nothing to clean up."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(run())

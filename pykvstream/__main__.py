"""``python -m pykvstream`` is the command ``pykvstream``."""

import sys

from pykvstream.cli import main

if __name__ == "__main__":
    sys.exit(main())

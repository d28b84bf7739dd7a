"""`python -m kvrelay` is `kvrelay`."""

from __future__ import annotations

import sys

from kvrelay.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m ridgeline` is `ridgeline`."""

import sys

from ridgeline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

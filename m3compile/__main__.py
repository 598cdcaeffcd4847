"""`python -m m3compile`."""

import sys

from m3compile.cli.app import main

if __name__ == "__main__":
    sys.exit(main())

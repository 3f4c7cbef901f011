"""`python -m outrider` is the command line."""

import sys

from outrider.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m strop`: the same as `strop`."""

import sys

from strop.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

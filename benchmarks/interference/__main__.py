"""`python -m benchmarks.interference --sha SHA --out FILE` on a GPU host, in some four minutes."""

import sys

from benchmarks.interference.command import main

if __name__ == "__main__":
    sys.exit(main())

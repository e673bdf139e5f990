"""`python -m benchmarks.kv_engine --sha SHA --out FILE` on a GPU host, in eight minutes at most."""

import sys

from benchmarks.kv_engine.command import main

if __name__ == "__main__":
    sys.exit(main())

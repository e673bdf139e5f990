"""`python -m benchmarks.quality --model FOLDER --device cuda:0 --sha SHA --out FILE`, or
`--device cpu --tokens 1536 --windows 1` to try it: figures are printed, and no file is written.
"""

import sys

from benchmarks.quality.command import main

if __name__ == "__main__":
    sys.exit(main())

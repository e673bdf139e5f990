"""`python -m benchmarks.http.client_process TOLD ANSWER`: pickles, between processes of one run."""

import asyncio
import pickle
import sys
from pathlib import Path

from benchmarks.http.client import load


def main() -> int:
    told_file, answer_file = map(Path, sys.argv[1:])
    answer = asyncio.run(load(pickle.loads(told_file.read_bytes())))
    answer_file.write_bytes(pickle.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())

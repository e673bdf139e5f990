"""`python -m benchmarks.engine`: results/engine-cpu.json, in about three minutes."""

import sys

from benchmarks.command import run_benchmark
from benchmarks.engine.throughput import GATE, throughput

PACKAGES = ("torch", "transformers")

if __name__ == "__main__":
    sys.exit(run_benchmark("engine-cpu", GATE, throughput, PACKAGES, "benchmarks.engine"))

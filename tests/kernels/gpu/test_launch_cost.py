"""What a launch costs the host: printed, and the contract's part bounded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
MAX_CONTRACT_US = 10.0


def test_a_contract_is_checked_within_10_us() -> None:
    command = [sys.executable, "-m", "tests.kernels.gpu.launch_cost"]
    root = Path(__file__).parents[3]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    for part, costs in found.items():
        for name, cost_us in costs.items():
            print(f"{part}: {name} {cost_us:.1f} us")
    assert {n: us for n, us in found["contracts"].items() if us > MAX_CONTRACT_US} == {}

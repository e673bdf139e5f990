"""What nvidia-smi says of the GPU that is measured. CUDA is left alone, so the driver counts none
of its memory as ours."""

import os
import subprocess

from benchmarks.errors import MeasurementFailed


def query_gpu(*fields: str) -> list[str]:
    """Values of the fields of `nvidia-smi --help-query-gpu`, with their units, for the first GPU
    that CUDA may see. Raises MeasurementFailed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")  # indices, or UUIDs
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        ran = subprocess.run(
            [*command, f"--id={visible[0].strip()}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise MeasurementFailed(f"expected a GPU that nvidia-smi knows: {exc}") from exc
    return [value.strip() for value in ran.stdout.split(",")]

"""What the page says of each file, in its order."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.report.results_file import ResultsFile

LLAMA = "The Llama 3.1 8B shape in bfloat16 with random weights"


@dataclass(frozen=True, slots=True)
class Section:
    """`only_bars`: the table leaves out what has none, for the file has too many rows to read."""

    title: str
    said: str = ""
    only_bars: bool = False
    found: Callable[[ResultsFile], str] | None = None

    def measured(self, file: ResultsFile) -> str:
        """What of the file a reader must know beside its rows: half a sentence, or nothing."""
        return self.found(file) if self.found is not None else ""


def tokens_an_event(file: ResultsFile) -> str:
    """Gaps between texts are not those between tokens where a server sends several at once."""
    means = {
        server: statistics.mean(
            [each["tokens_an_event"] for rounds in of_server.values() for each in rounds]
        )
        for server, of_server in file.content.get("rounds", {}).items()
    }
    if not means:
        return ""
    told = ", ".join(f"{tokens:.1f} of {server}" for server, tokens in means.items())
    return f"tokens in one text: {told}"


SECTIONS: Mapping[str, Section] = {
    "engine-exact-h200": Section(
        "The engine, exact",
        f"{LLAMA}, and SmolLM2 135M's; 32 x 8K is 32 sequences of 8,192 tokens. Both engines are "
        "timed at their `step()`.",
    ),
    "http-h200": Section(
        "Over HTTP",
        f"{LLAMA}: `flashray serve` with keys, limits and audit, then `vllm serve`; requests as "
        "long as in ShareGPT, 1, 32 or 128 at once.",
        found=tokens_an_event,
    ),
    "interference-h200": Section(
        "While a prompt of 128K is computed",
        "16 streams decode; then a fresh long prompt comes, and a short one every half second. "
        "Ours keeps to an ITL budget meanwhile, which costs the long prompt time.",
    ),
    "kv-interference-h200": Section(
        "The same with tiers",
        "Beside our exact mode in the same run: what tiers cost the long prompt, of which every "
        "chunk restores the older blocks.",
    ),
    "kv-engine-h200": Section(
        "The engine with tiers",
        f"{LLAMA}, a [KV cache that ages](kv-tiers.md) with 4-bit cold tokens, beside our exact "
        "mode, vLLM in bf16 and with an fp8 cache; each in the same bytes. What tiers cost in "
        "answers: [quality](quality.md).",
    ),
    "kv-attention-h200": Section(
        "Decode attention over tiers",
        "One layer of the same shape; its keys and values in bf16 are what FlashAttention 3 reads.",
    ),
    "kv-quality": Section(
        "What tiers cost in answers", "With intervals, pictures and method: [quality](quality.md)."
    ),
    "kernels-h200": Section(
        "Kernels",
        "What has a bar; what each op does: [kernels](../kernels/README.md).",
        only_bars=True,
    ),
    "router-cpu": Section(
        "The router, on a CPU",
        "The whole gateway in front of a mock, beside LiteLLM: latency that it adds, and the load "
        "that it holds.",
    ),
    "serving-cpu": Section(
        "Serving, on a CPU",
        "SmolLM2 135M in float32: in process beside Hugging Face, and over HTTP.",
    ),
    "engine-cpu": Section("The engine, on a CPU", "SmolLM2 135M in float32, in process."),
    "kv-arena-cpu": Section(
        "The books of the KV cache", "What the host pays for blocks, and what fits into a pool."
    ),
    "kernel-bundle-cpu": Section(
        "Kernels ahead of time", "Building all of them on a host without a GPU, and loading them."
    ),
    "soak-h200": Section(
        "Soak, on a GPU", "What random load must not do to an engine, however long."
    ),
    "soak-cpu": Section(
        "Soak, on a CPU", "What random load must not do to an engine, however long."
    ),
    "soak-tiers-h200": Section(
        "Soak, with tiers, on a GPU",
        "Beside another process on the same GPU; tokens age to 8-bit keys and 4-bit values.",
    ),
    "soak-tiers-cpu": Section(
        "Soak, with tiers, on a CPU",
        "The same, while tokens age to 8-bit keys and 4-bit values.",
    ),
}


def in_order(files: Mapping[str, ResultsFile]) -> list[tuple[Section, ResultsFile]]:
    """Files that nothing is said of come last, under their names."""
    known = [(SECTIONS[name], files[name]) for name in SECTIONS if name in files]
    others = [(Section(name), files[name]) for name in sorted(set(files) - set(SECTIONS))]
    return known + others

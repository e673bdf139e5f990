"""What an engine asks of a node: bundles of one placement group, decided before anything starts."""

from dataclasses import dataclass

SHELL_BUNDLE = 0
STRATEGY = "STRICT_PACK"  # ranks share memory: one node


@dataclass(frozen=True, slots=True)
class RankResources:
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def as_bundle(self) -> dict[str, float]:
        """Ray refuses a bundle with zeros in it."""
        bundle = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in bundle.items() if amount}


def engine_bundles(
    num_ranks: int, resources: RankResources, shell_cpus: float
) -> list[dict[str, float]]:
    """The shell's bundle, then one a rank: rank r is placed in bundle `bundle_of(r)`."""
    return [{"CPU": shell_cpus}, *(resources.as_bundle() for _ in range(num_ranks))]


def bundle_of(rank: int) -> int:
    return SHELL_BUNDLE + 1 + rank

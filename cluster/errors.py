"""Everything cluster bring-up raises on purpose.

ClusterError
├── PortInUse          another process listens there
└── RayUnavailable     Ray did not start; says what to look at
"""


class ClusterError(Exception):
    """Root of the tree."""


class PortInUse(ClusterError):
    """Another process listens on the port."""


class RayUnavailable(ClusterError):
    """Ray did not start."""

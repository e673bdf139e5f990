"""Everything bring-up raises on purpose.

DeploymentError
├── ConfigError          a setting is wrong; names it
├── ModelFilesError      model files cannot be used; names file and tensor
├── BringUpError         the cluster did not come up; says what to check
└── ReplicaRefusal       one replica took no request; says which, so that another one is asked
"""

from router.errors import BackendUnavailable


class DeploymentError(Exception):
    """Root of the tree. Printed without a traceback by the command line."""


class ConfigError(DeploymentError):
    """A setting is wrong."""


class ModelFilesError(DeploymentError):
    """Model files are missing, damaged or of a kind that cannot be served."""


class BringUpError(DeploymentError):
    """The cluster did not come up."""


class ReplicaRefusal(DeploymentError):
    """`replica` is its Serve tag, `reason` what a client is told when no other one takes it."""

    def __init__(self, reason: BackendUnavailable, replica: str) -> None:
        super().__init__(reason, replica)
        self.reason, self.replica = reason, replica

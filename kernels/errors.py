"""What can go wrong with a kernel; every message names the kernel, and the argument at fault.

KernelError
|- ContractError            an argument of a launch is not what the kernel's contract says
|- CheckFailure             found by the checked interpreter
|  |- OutOfBounds           a lane touches an element that its argument does not have
|  |- DoubleStore           two programs store one element, or one reads what another one stores
|  |- StoredInput           a store into an argument that the contract says is only read
|  |- Uninitialised         an element of an output was never stored, or was read before it was
|  `- DeviceAssertion       a `tl.device_assert`, or an integer that overflowed
|- UnsupportedTriton        a version of Triton whose interpreter is not known
|- BundleError              a bundle cannot be read, or has no code for this launch
|  `- CorruptBundle         a file of it is not what its index says
`- ScopeClosed              a stream, event or buffer is used after the end of its scope
"""


class KernelError(Exception):
    """Of the toolchain, or of a kernel."""


class ContractError(KernelError):
    def __init__(self, kernel: str, argument: str, expected: str, came: str) -> None:
        super().__init__(f"{kernel}: {argument} must be {expected}, came {came}")
        self.kernel, self.argument = kernel, argument


class CheckFailure(KernelError):
    pass


class OutOfBounds(CheckFailure):
    pass


class DoubleStore(CheckFailure):
    pass


class StoredInput(CheckFailure):
    pass


class Uninitialised(CheckFailure):
    pass


class DeviceAssertion(CheckFailure):
    pass


class UnsupportedTriton(KernelError):
    pass


class BundleError(KernelError):
    pass


class CorruptBundle(BundleError):
    pass


class ScopeClosed(KernelError):
    pass

"""The way of a launch on a GPU: from the bundle where it has the code, else compiled just in time.

Which code a GPU gets is chosen once per variant and device; a launch then costs a look-up, its
arguments in the driver's form, and the driver.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.bundle.bundle import Bundle
from kernels.bundle.driver import CudaDriver, Driver, Grid, LaunchConfig
from kernels.bundle.index import Key, default_folder
from kernels.contract import Contract, Scalar
from kernels.errors import BundleError, ContractError, CorruptBundle, KernelError

if TYPE_CHECKING:
    from kernels.launch import Launcher

WARP_SIZE = 32
# Triton's kernels end in two pointers to scratch memory; a bundle's need none.
NO_SCRATCH = (0, 0)
TRUE_WORDS = ("1", "on", "true", "y", "yes")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One variant on one device, and what its launches have in common."""

    kernel: str
    function: Any
    block: int
    shared_bytes: int
    waits: bool
    converters: tuple[Callable[[Any], Any], ...]


class BundleWay:
    """bundle: None where there is none."""

    def __init__(self, bundle: Bundle | None, driver: Driver) -> None:
        self._bundle = bundle
        self._driver = driver
        self._loaded: dict[tuple[Any, ...], Loaded | None] = {}
        self._warned: set[str] = set()

    @classmethod
    def of_process(cls) -> "BundleWay":
        """Raises CorruptBundle."""
        folder = default_folder()
        bundle = None
        if os.environ.get("TRITON_DEBUG", "").lower() in TRUE_WORDS:
            logger.info("TRITON_DEBUG: kernels are compiled just in time, with their assertions")
        else:
            try:
                bundle = Bundle.open(folder)
            except FileNotFoundError:
                logger.info("no kernel bundle in %s: kernels are compiled just in time", folder)
        return cls(bundle, CudaDriver())

    def __call__(
        self, launcher: "Launcher", grid: Grid, arguments: Sequence[Any], meta: Mapping[str, int]
    ) -> None:
        """On the current stream, of arguments that passed the contract's check. Raises
        ContractError for tensors that are not on the current device, CorruptBundle."""
        contract = launcher.contract
        tensors = arguments[: len(contract.tensors)]
        device = self._driver.current_device()
        if tensors[0].get_device() != device:
            _refuse_device(contract, tensors[0], device)
        dtypes = [tensor.dtype for tensor in tensors]
        key = (contract.kernel, device, contract.is_aligned(arguments), *dtypes, *meta.items())
        try:
            loaded = self._loaded[key]
        except KeyError:
            loaded = self._loaded[key] = self._load(contract, device, arguments, meta)
        if loaded is None or not self._launch(loaded, grid, device, tensors, arguments):
            launcher.kernel().launch(grid, arguments, meta)

    def _launch(
        self,
        loaded: Loaded,
        grid: Grid,
        device: int,
        tensors: Sequence[torch.Tensor],
        arguments: Sequence[Any],
    ) -> bool:
        """False when an argument is too wide for the code."""
        scalars = arguments[len(tensors) :]
        try:
            converted = [
                convert(value) for convert, value in zip(loaded.converters, scalars, strict=True)
            ]
        except OverflowError:
            self._warn(loaded.kernel, "a size or a stride does not fit in 32 bits")
            return False
        passed = (*[tensor.data_ptr() for tensor in tensors], *converted, *NO_SCRATCH)
        stream = self._driver.current_stream(device)
        config = LaunchConfig(grid, loaded.block, loaded.shared_bytes, loaded.waits)
        try:
            self._driver.launch(loaded.function, config, stream, passed)
        except Exception as exc:
            raise KernelError(
                f"{loaded.kernel}: the driver refuses a launch of {grid} programs on "
                f"cuda:{device}, or says what an earlier one did: {exc}"
            ) from exc
        return True

    def _load(
        self, contract: Contract, device: int, arguments: Sequence[Any], meta: Mapping[str, int]
    ) -> Loaded | None:
        """None, with a warning why, when there is no code for this launch."""
        if self._bundle is None:
            return None
        try:
            return self._load_from(self._bundle, contract, device, arguments, meta)
        except CorruptBundle:
            raise
        except BundleError as exc:
            self._warn(contract.kernel, str(exc))
            return None

    def _load_from(
        self,
        bundle: Bundle,
        contract: Contract,
        device: int,
        arguments: Sequence[Any],
        meta: Mapping[str, int],
    ) -> Loaded:
        kernel = contract.kernel
        if why_stale := bundle.why_stale(kernel):
            raise BundleError(f"the bundle is stale: {why_stale}")
        tensors = arguments[: len(contract.tensors)]
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        keys = [Key(kernel, dtypes, tuple(sorted(meta.items())), each) for each in (True, False)]
        # Code for any sizes runs aligned ones as well.
        fitting = keys if contract.is_aligned(arguments) else keys[1:]
        capability = self._driver.capability(device)
        found = (bundle.pick(key, capability) for key in fitting)
        entry = next((entry for entry in found if entry is not None), None)
        if entry is None:
            raise BundleError(f"the bundle has no {fitting[0]} for sm_{capability}")
        function = self._driver.load(entry, bundle.image(entry), device)
        block = WARP_SIZE * entry.num_warps
        shared_bytes, waits = entry.shared_bytes, entry.waits
        return Loaded(kernel, function, block, shared_bytes, waits, _converters(contract))

    def _warn(self, kernel: str, why: str) -> None:
        """Once per process and kernel."""
        if kernel not in self._warned:
            self._warned.add(kernel)
            logger.warning("kernel %s is compiled just in time: %s", kernel, why)


def _converters(contract: Contract) -> tuple[Callable[[Any], Any], ...]:
    """Of its scalars, to the width that the code was compiled for."""
    return tuple(
        np.float32 if isinstance(scalar, Scalar) and scalar.kind is float else np.int32
        for scalar in contract.scalars.values()
    )


def _refuse_device(contract: Contract, tensor: torch.Tensor, device: int) -> None:
    expected = f"on the current device cuda:{device}"
    raise ContractError(contract.kernel, next(iter(contract.tensors)), expected, str(tensor.device))

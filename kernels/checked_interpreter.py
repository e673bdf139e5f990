"""A kernel without a GPU, and without trust: what Rust's debug build is to its release build.

    with checked():
        product = silu_mul(gate_up)  # CPU tensors; the op's kernel runs, checked

Every lane of every load, store and atomic must touch an element of the argument that its pointer
was derived from; `tl.device_assert` and integers that overflow stop the launch; what two programs
do to one element must not depend on their order; every element of an output must be stored, and
none read before. Casts, bfloat16 arithmetic and `tl.dot` round as on a GPU. Not known: an order
that atomics (a semaphore) or barriers make between programs; those are refused as races.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kernels.errors import UnsupportedTriton
from kernels.launch import Launcher, launching

if TYPE_CHECKING:
    from kernels.kernel import Kernel

KNOWN_TRITON = ("3.6", "3.7")


@contextmanager
def checked() -> Iterator[None]:
    """Within it every op runs its kernel on CPU tensors, as `run_checked` does."""
    require_interpreter()
    with launching(_way):
        yield


def _way(
    launcher: Launcher, grid: tuple[int, ...], arguments: Sequence[Any], meta: Mapping[str, int]
) -> None:
    run_checked(launcher.kernel(), grid, arguments, meta)


def run_checked(
    kernel: "Kernel", grid: tuple[int, ...], arguments: Sequence[Any], meta: Mapping[str, int]
) -> None:
    """One launch. arguments: tensors and scalars in the contract's order; meta: its constexprs.

    Raises ContractError, CheckFailure (the outputs are then poisoned or half stored), or
    UnsupportedTriton.
    """
    require_interpreter()
    from kernels.checking.execute import execute

    kernel.contract.check(*arguments)
    if 0 in grid:
        kernel.contract.check_without_programs(*arguments)
    else:
        execute(kernel, grid, arguments, meta)


def assert_equals_reference(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    *arguments: Any,
    rtol: float = 0.0,
    atol: float = 0.0,
    **named: Any,
) -> None:
    """`op`, checked, returns what `reference` returns, and leaves its arguments as that does.

    Both get copies of the arguments; strides, offsets and shared memory are kept. NaN equals NaN.
    """
    ours, theirs = copy.deepcopy((arguments, named)), copy.deepcopy((arguments, named))
    with checked():
        result = op(*ours[0], **ours[1])
    expected = reference(*theirs[0], **theirs[1])
    left, right = ([*each[0], *each[1].values()] for each in (ours, theirs))
    assert_same((result, left), (expected, right), rtol=rtol, atol=atol)


def assert_same(
    came: tuple[Any, Sequence[Any]],
    expected: tuple[Any, Sequence[Any]],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """What two calls returned, and the tensors among the arguments they leave."""
    for one, other in (came[0], expected[0]), (tensors_of(came[1]), tensors_of(expected[1])):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


def tensors_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in arguments if isinstance(each, torch.Tensor)]


def require_interpreter() -> None:
    """Raises UnsupportedTriton: a version nobody has read, or one imported to compile."""
    import triton
    import triton.language as tl

    series = ".".join(triton.__version__.split(".")[:2])
    if series not in KNOWN_TRITON:
        raise UnsupportedTriton(
            f"the checked interpreter knows the interpreters of triton {' and '.join(KNOWN_TRITON)}"
            f", this is {triton.__version__}: install one of those, or read the new one, run "
            "tests/kernels with it and add it to KNOWN_TRITON"
        )
    if type(tl.sum).__name__ != "InterpretedFunction":
        raise UnsupportedTriton(
            "triton was imported to compile: set TRITON_INTERPRET=1 before triton is imported"
        )

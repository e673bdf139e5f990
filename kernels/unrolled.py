"""The check that each launch passes, written out for one contract: it has no loop to pay for.

Of a launch like the last one it compares forms, scalars and addresses; whatever differs is handed
to the contract, which looks it up, checks it or says what is wrong.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Check = Callable[..., None]


class Range(Protocol):
    @property
    def kind(self) -> type: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def unrolled(
    contract: Any,
    aligns: Sequence[int],
    contiguous: Sequence[bool],
    implied: Sequence[int],
    free: Sequence[tuple[int, Range]],
    beside: Sequence[tuple[int, int]],
) -> Check:
    """aligns, contiguous: of the tensors, which come first; of a contiguous one no stride is asked
    for. implied: the scalars, by place among all arguments, that shapes and strides imply. free:
    the others, by place too. beside: pairs (stored, other) of tensors."""
    tensors = range(len(aligns))
    lines = [
        "def check(*arguments):",
        f"    if len(arguments) != {len(contract.names)}:",
        "        contract.refuse_count(arguments)",
        f"    {_tuple('a', range(len(contract.names)))} = arguments",
        "    try:",
        f"        forms = ({''.join(_form(n, contiguous[n]) for n in tensors)})",
        *(f"        start{n} = a{n}.data_ptr()" for n in tensors),
        "    except (AttributeError, RuntimeError):  # no tensor, or one without memory",
        "        contract.check_forms(arguments)",
        "        raise",
        "    latest, expected = contract.latest",
        "    if forms != latest:  # most launches are like the last one",
        "        expected = contract.expected_of(forms, arguments)",
        "    if forms[3] < 0:  # not the number of a GPU: a processor's memory, or none",
        "        contract.check_devices(arguments)",
        f"    scalars, {_tuple('bytes', tensors)} = expected",
        *_aligned(aligns),
    ]
    if implied:
        types = " is ".join([*(f"type(a{n})" for n in implied), "int"])
        lines += [
            f"    if {_tuple('a', implied)} != scalars or not ({types}):",
            "        contract.refuse_scalars(arguments, scalars)",
        ]
    names: dict[str, Any] = {"contract": contract}
    for n, scalar in free:
        names |= {f"kind{n}": scalar.kind, f"low{n}": scalar.low, f"high{n}": scalar.high}
        lines += [
            f"    if type(a{n}) is not kind{n} or not low{n} <= a{n} <= high{n}:",
            "        contract.check_free(arguments)",
        ]
    lines += _apart(beside)
    exec("\n".join(lines), names)  # of nothing but the lines above and numbers
    check: Check = names["check"]
    return check


def _tuple(name: str, places: Sequence[int]) -> str:
    return "(" + "".join(f"{name}{n}, " for n in places) + ")"


def _form(n: int, is_contiguous: bool) -> str:
    """Numbers of devices: they compare in half the time that devices do."""
    layout = "is_contiguous()" if is_contiguous else "stride()"
    return f"a{n}.shape, a{n}.{layout}, a{n}.dtype, a{n}.get_device(), "


def _apart(beside: Sequence[tuple[int, int]]) -> list[str]:
    """An end that is asked for once is added up where it is asked for: half the time it is not."""
    asked = Counter(n for pair in beside for n in pair)
    ends = {n: f"end{n}" if times > 1 else f"start{n} + bytes{n}" for n, times in asked.items()}
    lines = [f"    end{n} = start{n} + bytes{n}" for n, times in asked.items() if times > 1]
    for stored, other in beside:
        lines += [
            f"    if start{other} < {ends[stored]} and start{stored} < {ends[other]}:",
            f"        contract.check_overlap(arguments, {stored}, {other})",
        ]
    return lines


def _aligned(aligns: Sequence[int]) -> list[str]:
    """One test for all that are aligned alike."""
    lines = []
    for align in sorted(set(aligns) - {1}):
        starts = " | ".join(f"start{n}" for n, each in enumerate(aligns) if each == align)
        lines += [f"    if ({starts}) & {align - 1}:", "        contract.refuse_align(arguments)"]
    return lines

"""The check that each launch passes, written out for one contract: it has no loop to pay for.

Of a launch like the last one it compares forms, scalars and addresses; whatever differs is handed
to the contract, which looks it up, checks it or says what is wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

Check = Callable[..., None]


def unrolled(
    contract: Any, aligns: Sequence[int], implied: Sequence[int], beside: Sequence[tuple[int, int]]
) -> Check:
    """aligns: of the tensors, which come first. implied: the scalars, by place among all arguments,
    that shapes and strides imply. beside: pairs (stored, other) of tensors."""
    num_tensors, num_arguments = len(aligns), len(contract.names)
    tensors = range(num_tensors)
    forms = "".join(f"a{n}.shape, a{n}.stride(), a{n}.dtype, a{n}.device, " for n in tensors)
    lines = [
        "def check(*arguments):",
        f"    if len(arguments) != {num_arguments}:",
        "        contract.refuse_count(arguments)",
        f"    {_tuple('a', range(num_arguments))} = arguments",
        "    try:",
        f"        forms = ({forms})",
        "    except (AttributeError, RuntimeError):  # no tensor, or one without strides",
        "        forms = None",
        "    latest, expected = contract.latest",
        "    if forms is None or forms != latest:  # most launches are like the last one",
        "        expected = contract.expected_of(forms, arguments)",
        f"    scalars, {_tuple('bytes', tensors)} = expected",
        *(f"    start{n} = a{n}.data_ptr()" for n in tensors),
        *_aligned(aligns),
    ]
    if implied:
        types = " is ".join([*(f"type(a{n})" for n in implied), "int"])
        lines += [
            f"    if {_tuple('a', implied)} != scalars or not ({types}):",
            "        contract.refuse_scalars(arguments, scalars)",
        ]
    if len(implied) < num_arguments - num_tensors:
        lines.append("    contract.check_free(arguments)")
    for stored, other in beside:
        lines += [
            f"    if start{other} < start{stored} + bytes{stored} "
            f"and start{stored} < start{other} + bytes{other}:",
            f"        contract.check_overlap(arguments, {stored}, {other})",
        ]
    names: dict[str, Any] = {"contract": contract}
    exec("\n".join(lines), names)  # of nothing but the lines above and numbers
    check: Check = names["check"]
    return check


def _tuple(name: str, places: Sequence[int]) -> str:
    return "(" + "".join(f"{name}{n}, " for n in places) + ")"


def _aligned(aligns: Sequence[int]) -> list[str]:
    """One test for all that are aligned alike."""
    lines = []
    for align in sorted(set(aligns) - {1}):
        starts = " | ".join(f"start{n}" for n, each in enumerate(aligns) if each == align)
        lines += [f"    if ({starts}) & {align - 1}:", "        contract.refuse_align(arguments)"]
    return lines

from dataclasses import dataclass

import torch

from engine.execution.uploads import ALIGNMENT, upload_together

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    numbers: torch.Tensor
    none: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    first: torch.Tensor
    leaves: tuple[Leaf, ...]
    rows: slice


def test_tensors_of_any_kind_travel_in_one_piece() -> None:
    columns = torch.arange(12, dtype=torch.int32).view(3, 4).T
    tree = Tree(
        torch.tensor([-1, 2**40, 7]),
        (
            Leaf("a", columns),
            Leaf("b", torch.zeros(0, 4, dtype=torch.int32)),
            Leaf("c", torch.ones(3, 1)[:, 0].expand(1, 3)),
        ),
        slice(2, 5),
    )

    came = upload_together(tree, CPU)

    assert torch.equal(came.first, tree.first)
    assert [leaf.name for leaf in came.leaves] == ["a", "b", "c"]
    assert torch.equal(came.leaves[0].numbers, columns)
    assert came.leaves[1].numbers.shape == (0, 4)
    assert came.leaves[2].numbers.tolist() == [[1.0] * 3]
    assert came.leaves[0].none is None
    assert came.rows == slice(2, 5)
    tensors = [came.first, *(leaf.numbers for leaf in came.leaves)]
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == 1
    assert all(each.data_ptr() % ALIGNMENT == 0 and each.is_contiguous() for each in tensors)


def test_nothing_is_nothing() -> None:
    assert upload_together((), CPU) == ()

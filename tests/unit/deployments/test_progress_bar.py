"""Progress on a terminal, and where there is none."""

import io

import pytest

from deployments.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_bar_is_drawn_in_place_and_ends_its_line() -> None:
    terminal = Terminal()
    bar = ProgressBar("measuring", "layers", 4, terminal)
    for _ in range(4):
        bar.advance()
    drawn = terminal.getvalue().split("\r")
    assert [each.count("#") for each in drawn] == [0, 10, 20, 30, 40]
    assert all(each.count("#") + each.count(".") == 40 for each in drawn[1:])
    assert "2/4 layers" in drawn[2]
    assert terminal.getvalue().count("\n") == 1
    assert drawn[-1].endswith("\n")


@pytest.mark.parametrize(("total", "num_lines"), [(3, 3), (60, 10), (64, 10)])
def test_elsewhere_it_is_a_line_each_tenth(total: int, num_lines: int) -> None:
    stream = io.StringIO()
    bar = ProgressBar("measuring", "layers", total, stream)
    for _ in range(total):
        bar.advance()
    lines = stream.getvalue().splitlines()
    assert len(lines) == num_lines
    assert lines[-1].startswith(f"measuring {total}/{total} layers")

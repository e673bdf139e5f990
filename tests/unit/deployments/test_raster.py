"""A raster is drawn as asked, and any reader of PNG sees the same pixels."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.pixel_font import ADVANCE, HEIGHT, WIDTH, drawn
from deployments.raster import Raster, text_width

INK = (31, 41, 51)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:%-+/()_=<>?*'"


def read(png: bytes) -> np.ndarray:
    found = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    assert found is not None
    return found[..., ::-1]  # it has blue first


@given(st.integers(1, 40), st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_reader_sees_the_same_pixels(width: int, height: int, random) -> None:
    raster = Raster(width, height)
    raster.pixels[:] = np.frombuffer(random.randbytes(height * width * 3), np.uint8).reshape(
        height, width, 3
    )
    assert (read(raster.png()) == raster.pixels).all()


def test_a_rectangle_covers_what_it_says_and_is_cut_at_the_edges() -> None:
    raster = Raster(10, 8)
    raster.fill(2, 3, 4, 2, INK)
    raster.fill(-3, -3, 4, 4, INK)
    raster.fill(9, 7, 5, 5, INK)
    raster.fill(20, 20, 5, 5, INK)
    inked = (raster.pixels == INK).all(2)
    assert inked.sum() == 4 * 2 + 1 + 1
    assert inked[3:5, 2:6].all()
    assert inked[0, 0]
    assert inked[7, 9]


@pytest.mark.parametrize(("anchor", "left"), [("start", 40), ("middle", 17), ("end", -6)])
def test_words_lie_where_their_anchor_is(anchor, left: int) -> None:
    raster = Raster(120, 20)
    raster.write(40, 3, "HHHH", INK, anchor)
    columns = np.flatnonzero((raster.pixels != 255).any((0, 2)))
    assert text_width("HHHH") == 46
    assert columns.min() == max(left, 0)
    assert columns.max() == max(left, 0) + 45


def test_every_letter_of_the_font_is_its_own() -> None:
    glyphs = {drawn(letter).tobytes(): letter for letter in ALPHABET}
    assert len(glyphs) == len(ALPHABET)
    for letter in ALPHABET:
        glyph = drawn(letter)
        assert glyph.shape == (HEIGHT, ADVANCE)
        assert glyph[:, :WIDTH].any()
        assert not glyph[:, WIDTH:].any()


def test_small_letters_are_capitals_and_unknown_ones_question_marks() -> None:
    assert (drawn("mass 1 %") == drawn("MASS 1 %")).all()
    assert (drawn("日é", scale=3) == drawn("??", scale=3)).all()
    assert not drawn(" ").any()
    assert drawn("").shape == (HEIGHT, 0)
    assert drawn("AB", scale=3).shape == (3 * HEIGHT, 3 * 2 * ADVANCE)

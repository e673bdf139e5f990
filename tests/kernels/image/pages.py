"""Pages to test with: noise, and what looks like a scanned report."""

import cv2
import numpy as np
import torch

SHAPES = [(1, 1, 1), (1, 1, 17), (3, 5, 7), (2, 16, 16), (3, 31, 47), (1, 69, 90)]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def report(height: int, width: int, seed: int = 0) -> torch.Tensor:
    """A grey page [height, width]: lines of text, a ruled table, uneven light and some noise."""
    generator = np.random.default_rng(seed)
    page = np.full((height, width), 235, np.uint8)
    scale = max(height / 1000, 0.3)
    step = max(int(30 * scale), 9)
    for y in range(2 * step, height // 2, step):
        words = " ".join(str(number) for number in generator.integers(10, 10**7, 40))
        cv2.putText(page, words, (step, y), cv2.FONT_HERSHEY_SIMPLEX, 0.7 * scale, 20, 1)
    for y in range(height // 2 + step, height - step, step):
        cv2.line(page, (step, y), (width - step, y), 60, 1)
    for x in range(step, width, 4 * step):
        cv2.line(page, (x, height // 2 + step), (x, height - step), 60, 1)
    light = np.linspace(1.0, 0.6, width)[None, :] * np.linspace(0.9, 1.0, height)[:, None]
    shaded = page * light + generator.normal(0, 3, page.shape)
    return torch.from_numpy(shaded.clip(0, 255).astype(np.uint8))

"""What the grammars of a step let through, as bits for the kernel and as truth for torch."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch

from engine.grammar import num_mask_words
from engine.sequence import Sequence


def grammar_masks(
    sequences: Items[Sequence], vocab_size: int, device: torch.device
) -> torch.Tensor | None:
    """[num_sequences, num_mask_words(vocab_size)] int32 on `device`: bit b of word w says that
    token 32 w + b may come next. None where no sequence has a grammar. Waits for no device."""
    if all(sequence.grammar_state is None for sequence in sequences):
        return None
    masks = torch.full(
        (len(sequences), num_mask_words(vocab_size)),
        -1,
        dtype=torch.int32,
        pin_memory=device.type == "cuda",
    )
    for row, sequence in zip(masks.numpy(), sequences, strict=True):
        if sequence.grammar_state is not None:
            sequence.grammar_state.fill(row)
    return masks.to(device, non_blocking=True)


def allowed_tokens(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Of masks on the host: [num_sequences, vocab_size] bool."""
    words = masks.numpy().view(np.uint8)
    bits = np.unpackbits(words, axis=-1, count=vocab_size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))

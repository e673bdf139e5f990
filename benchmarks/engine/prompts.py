"""Prompts of one length, so that the peer needs no padding and both do the same work."""

from pathlib import Path

TEXT = (
    "On day one the ship sailed eleven miles under a clear sky and reached the harbour. "
    "The cook had counted forty barrels of water, nine of salted fish and two of dried apples. "
    "By evening the wind had turned to the north, and the captain ordered a second watch. "
    "Nobody aboard had seen the island before, though three old charts agreed on its place. "
    "In the morning the fog lifted slowly and showed a quiet bay with two white houses. "
    "A boy on the beach waved a red cloth, and the pilot answered with the small bell. "
    "They traded needles and rope for bread, cheese, and a basket of very sour cherries. "
    "The mate wrote all of this down, and added that the anchor chain wanted replacing soon. "
)


def prompts(model_path: Path, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Windows of one text, each from another place."""
    from tokenizers import Tokenizer

    token_ids = Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(TEXT * 2).ids
    stride = (len(token_ids) - num_tokens) // num_prompts
    assert stride > 0, "the text is long enough for the prompts asked for"
    return [token_ids[index * stride :][:num_tokens] for index in range(num_prompts)]

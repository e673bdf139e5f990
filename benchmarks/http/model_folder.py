"""A model folder that any server loads without a network: a shape, a tokenizer, a chat template.

Every word of the vocabulary is one token, whatever stands around it: a prompt of so many words has
so many tokens, and almost any token that random weights draw is text at once.
"""

import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.engine.shapes import Shape

# In this order: the ids that Shape writes into its config.json.
SPECIAL_TOKENS = ("<|unknown|>", "<|begin|>", "<|end|>", "<|turn|>")
SYLLABLES = tuple(map("".join, itertools.product("bcdfghjklmnpqrstvwxyz", "aeiou")))
BLANK = "Ġ"  # a space, as byte-level vocabularies spell it
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"
)


def write_model_folder(shape: Shape, folder: Path, max_model_len: int) -> Path:
    shape.write(folder, max_model_len)
    _tokenizer(shape.vocab_size).save(str(folder / "tokenizer.json"))
    _, begin, end, _ = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def words(vocab_size: int) -> list[str]:
    """The shortest words of the vocabulary, as they stand in a text."""
    room = vocab_size - _num_parts()
    pairs = itertools.product(SYLLABLES, SYLLABLES)
    return [f" {first}{second}" for first, second in itertools.islice(pairs, room)]


def _num_parts() -> int:
    """Tokens that are no word: special ones, bytes, syllables without and with a blank."""
    return len(SPECIAL_TOKENS) + 256 + 2 * len(SYLLABLES)


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Syllables end in a vowel and no merge begins with one, so no other merge comes between."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [(syllable[0], syllable[1]) for syllable in SYLLABLES]
    merges += [(BLANK, syllable) for syllable in SYLLABLES]
    merges += itertools.islice(_word_merges(), vocab_size - len(tokens) - len(merges))
    tokens += map("".join, merges)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _word_merges() -> itertools.chain[tuple[str, str]]:
    """Words of two syllables, then of three."""
    begins = [BLANK + syllable for syllable in SYLLABLES]
    short = list(itertools.product(begins, SYLLABLES))
    return itertools.chain(short, itertools.product(map("".join, short), SYLLABLES))

"""What must be found again in a long prompt: a passkey, a list's value, an early turn of a chat. A
small model may not find it; what counts is that a cache finds what the exact cache finds, and no
more."""

import random
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass

from benchmarks.quality.texts import Tokenizer, prose

DEPTHS = tuple(range(0, 101, 10))  # % of the prompt before the passkey
PASSKEY, CHAT, LIST = "passkey", "chat", "list"
SEED = 5
ANSWER_TOKENS = 8  # as many are generated, of which those of the answer count
NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jetty")
FACTS = (
    ("My name is Tobias and I live in Lisbon.", "Where do I live? You live in", " Lisbon"),
    ("My dog is called Pepper.", "What is my dog called? Your dog is called", " Pepper"),
    ("I was born in 1973.", "In which year was I born? You were born in", " 1973"),
)
NUM_QUERIES = 4
# The passkey of Mohtashami and Jaggi (Landmark Attention, 2023), their words, as a turn of a chat.
INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I "
    "will quiz you about the important information there."
)
HAY = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TURN = "<|im_start|>{role}\n{text}<|im_end|>\n"
BEGUN = "<|im_start|>{role}\n{text}"


@dataclass(frozen=True, slots=True)
class Task:
    """`num_answer_tokens`: of the right answer, and so many of what is said count."""

    kind: str
    name: str
    prompt: list[int]
    answer: str
    num_answer_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """`is_right`: as the prompt has it. `equals_exact`: right where the exact cache is right, and
    only there. `is_same`: token for token what the exact cache says."""

    text: str
    is_right: bool
    equals_exact: bool
    is_same: bool


def tasks(tokenizer: Tokenizer, num_tokens: int) -> list[Task]:
    """Their prompts, with answers, have at most `num_tokens` tokens, and not many fewer."""
    return [
        *_passkeys(tokenizer, num_tokens),
        *_lists(tokenizer, num_tokens),
        *_chats(tokenizer, num_tokens),
    ]


def answers(
    tasks: Items[Task], said: Items[list[int]], exact: Items[list[int]], tokenizer: Tokenizer
) -> dict[str, Answer]:
    """By the names of tasks, of the tokens said after each."""
    found = {}
    for task, came, expected in zip(tasks, said, exact, strict=True):
        num_tokens = task.num_answer_tokens
        ours, theirs = came[:num_tokens], expected[:num_tokens]
        text, of_exact = tokenizer.decode(ours), tokenizer.decode(theirs)
        is_right, was_right = (each.strip() == task.answer.strip() for each in (text, of_exact))
        found[task.name] = Answer(text, is_right, is_right == was_right, ours == theirs)
    return found


def summary(tasks: Items[Task], answers: Mapping[str, Answer]) -> dict[str, object]:
    """Shares by kind, and each answer; of no tasks nothing."""
    shares: dict[str, object] = {}
    for kind in dict.fromkeys(task.kind for task in tasks):
        of_kind = [answers[task.name] for task in tasks if task.kind == kind]
        shares[f"{kind}_right"] = sum(each.is_right for each in of_kind) / len(of_kind)
        shares[f"{kind}_equal"] = sum(each.equals_exact for each in of_kind) / len(of_kind)
        shares[f"{kind}_same"] = sum(each.is_same for each in of_kind) / len(of_kind)
    if answers:
        shares["answers"] = {name: asdict(each) for name, each in answers.items()}
    return shares


def _passkeys(tokenizer: Tokenizer, num_tokens: int) -> Iterator[Task]:
    choice = random.Random(SEED)
    opening = tokenizer.encode(
        TURN.format(role="system", text=SYSTEM)
        + BEGUN.format(role="user", text=f"{INTRODUCTION}\n\n")
    )
    question = tokenizer.encode(
        "\n\nWhat is the pass key?<|im_end|>\n"
        + BEGUN.format(role="assistant", text="The pass key is ")
    )
    hay = tokenizer.encode(HAY)
    hay *= -(-num_tokens // len(hay))
    for depth in DEPTHS:
        key = f"{choice.randrange(10_000, 100_000)}"
        needle = tokenizer.encode(NEEDLE.format(key=key))
        num_hay = num_tokens - ANSWER_TOKENS - len(opening) - len(question) - len(needle)
        num_before = num_hay * depth // 100
        prompt = opening + hay[:num_before] + needle + hay[num_before:num_hay] + question
        yield _task(PASSKEY, f"passkey, {depth} %", prompt, key, tokenizer)


def _lists(tokenizer: Tokenizer, num_tokens: int) -> Iterator[Task]:
    """Values of a list as long as the prompt: one from each of its quarters."""
    choice = random.Random(SEED + 1)
    keys = [
        f"{first}-{second}-{number}" for first in NAMES for second in NAMES for number in range(9)
    ]
    choice.shuffle(keys)
    pairs = [(key, f" {choice.randrange(100, 1000)}") for key in keys]
    lines = [tokenizer.encode(f"{key}:{value}\n") for key, value in pairs]
    num_left, num_lines = num_tokens - ANSWER_TOKENS - max(map(len, lines)), 0
    while num_lines < len(lines) and len(lines[num_lines]) <= num_left:
        num_left -= len(lines[num_lines])
        num_lines += 1
    listed = [token for line in lines[:num_lines] for token in line]
    for query in range(NUM_QUERIES):
        key, value = pairs[num_lines * (2 * query + 1) // (2 * NUM_QUERIES)]
        yield _task(LIST, f"list, {key}", listed + tokenizer.encode(f"{key}:"), value, tokenizer)


def _chats(tokenizer: Tokenizer, num_tokens: int) -> Iterator[Task]:
    """What the user said first, asked for after turns of long text."""
    facts = TURN.format(role="system", text=SYSTEM) + "".join(
        TURN.format(role="user", text=fact) + TURN.format(role="assistant", text="I will remember.")
        for fact, *_ in FACTS
    )
    opening = tokenizer.encode(facts + BEGUN.format(role="user", text="Read this, please.\n"))
    hay = tokenizer.encode(prose())[num_tokens:]
    for fact, question, answer in FACTS:
        asked, _, begun = question.partition("? ")
        closing = tokenizer.encode(
            "<|im_end|>\n"
            + TURN.format(role="assistant", text="I have read it.")
            + TURN.format(role="user", text=f"{asked}?")
            + BEGUN.format(role="assistant", text=begun)
        )
        num_hay = num_tokens - ANSWER_TOKENS - len(opening) - len(closing)
        yield _task(CHAT, f"chat, {fact}", opening + hay[:num_hay] + closing, answer, tokenizer)


def _task(kind: str, name: str, prompt: list[int], answer: str, tokenizer: Tokenizer) -> Task:
    return Task(kind, name, prompt, answer, min(len(tokenizer.encode(answer)), ANSWER_TOKENS))

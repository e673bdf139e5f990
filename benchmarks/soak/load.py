"""Requests of every kind, drawn at random: the same ones for the same seed."""

import math
import random
from dataclasses import dataclass

from engine.sampling_params import SamplingParams

SALTS = (b"", b"tenant")
SHARED_SHARE, WARM_UP_SHARE, TALKER_SHARE, STOPPING_SHARE = 0.5, 0.02, 0.5, 0.2
MAX_TALKER_PROMPT = 64


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine. `max_live` requests wait or run at most; about one in
    `1 / abort_share` is aborted, at a random step."""

    max_model_len: int
    vocab_size: int
    max_live: int
    max_new_tokens: int
    abort_share: float = 0.1
    num_prefixes: int = 3


@dataclass(frozen=True, slots=True)
class Request:
    seq_id: str
    prompt: list[int]
    params: SamplingParams
    salt: bytes


class Requests:
    """Prompts of 1 token to all that fits, every length as likely or every order of magnitude, in
    turn by chance; half of them begin with one of a few shared prefixes."""

    def __init__(self, load: Load, seed: int) -> None:
        self._load = load
        self._random = random.Random(seed)
        self._num_made = 0
        longest = load.max_model_len // 2
        self._prefixes = [
            self._tokens(self._random.randint(1, longest)) for _ in range(load.num_prefixes)
        ]

    def next(self) -> Request:
        load, choice = self._load, self._random
        self._num_made += 1
        kind = choice.random()
        max_tokens, longest = self._length(load.max_new_tokens), load.max_model_len
        if kind < WARM_UP_SHARE:
            max_tokens = 0
        elif kind < WARM_UP_SHARE + TALKER_SHARE:  # grow by most
            max_tokens, longest = load.max_new_tokens, MAX_TALKER_PROMPT + load.max_new_tokens
        length = self._length(min(longest, load.max_model_len) - max_tokens)
        prompt = self._tokens(length)
        if choice.random() < SHARED_SHARE:
            head = choice.choice(self._prefixes)[: length - 1]
            prompt[: len(head)] = head
        return Request(
            f"soak-{self._num_made}", prompt, self._params(max_tokens), choice.choice(SALTS)
        )

    def of_length(self, length: int) -> Request:
        """One prompt of its own."""
        params = SamplingParams(1, temperature=0.0)
        return Request(f"length-{length}", self._tokens(length), params, b"lengths")

    def _params(self, max_tokens: int) -> SamplingParams:
        choice = self._random
        kind = choice.choice(("greedy", "greedy", "sampled", "sampled", "penalised", "biased"))
        stops = self._tokens(self._load.vocab_size // 100)
        is_stopping = choice.random() < STOPPING_SHARE
        return SamplingParams(
            max_tokens,
            temperature=0.0 if kind == "greedy" else choice.uniform(0.1, 1.5),
            top_k=choice.choice((None, 1, 20, 100)) if kind == "sampled" else None,
            top_p=choice.uniform(0.5, 1.0) if kind == "sampled" else 1.0,
            min_p=choice.choice((0.0, 0.05)) if kind == "sampled" else 0.0,
            repetition_penalty=1.2 if kind == "penalised" else 1.0,
            presence_penalty=choice.uniform(-1.0, 1.0) if kind == "penalised" else 0.0,
            seed=choice.getrandbits(63),
            stop_token_ids=frozenset(stops if is_stopping else ()),
            logit_bias=((choice.randrange(self._load.vocab_size), 3.0),)
            if kind == "biased"
            else (),
            num_logprobs=choice.choice((None, None, None, 0, 5)),
        )

    def _tokens(self, length: int) -> list[int]:
        return self._random.choices(range(self._load.vocab_size), k=length)

    def _length(self, largest: int) -> int:
        """In [1, largest]."""
        if self._random.random() < 0.5:
            return self._random.randint(1, largest)
        return min(largest, int(math.exp(self._random.uniform(0.0, math.log(largest + 1)))))

"""Requests with lengths as in ShareGPT, the same for every server.

The data set is not there offline, so lengths are drawn from log-normal distributions. Their means
are those that `vllm bench serve` prints for 1,000 conversations of ShareGPT_V3, about 217 tokens of
prompt and 200 of answer; their widths are those of text that people write, from a line to pages. As
there, prompts beyond 1,024 tokens are left out; answers are cut at 640, so that a round does not
wait long for one of them alone.
"""

import math
import random
from dataclasses import dataclass

PROMPT_MEDIAN, PROMPT_SIGMA, MAX_PROMPT_TOKENS = 155, 1.2, 1024  # mean 217
ANSWER_MEDIAN, ANSWER_SIGMA, MAX_ANSWER_TOKENS = 140, 0.95, 640  # mean 199
MIN_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Request:
    """`num_tokens` of answer, exactly."""

    prompt: str
    num_tokens: int


def requests(
    vocabulary: list[str], num_requests: int, seed: int, scale: float = 1.0
) -> list[Request]:
    """No two prompts share more than their first words. `scale` shortens all lengths alike."""
    draw = random.Random(seed)
    return [
        Request(
            "".join(
                draw.choices(vocabulary, k=max(MIN_TOKENS, round(prompt_length(draw) * scale)))
            ),
            max(MIN_TOKENS, round(answer_length(draw) * scale)),
        )
        for _ in range(num_requests)
    ]


def prompt_length(draw: random.Random) -> float:
    while (
        length := draw.lognormvariate(math.log(PROMPT_MEDIAN), PROMPT_SIGMA)
    ) > MAX_PROMPT_TOKENS:
        pass
    return length


def answer_length(draw: random.Random) -> float:
    return min(draw.lognormvariate(math.log(ANSWER_MEDIAN), ANSWER_SIGMA), MAX_ANSWER_TOKENS)

"""What is asked and what is answered, the same for both gateways."""

import json
from typing import Literal

Dialect = Literal["chat", "messages"]

ANSWER = "The quick brown fox jumps over the lazy dog while the harbour sleeps in the morning fog."
UPSTREAM_LATENCY_MS = 20.0
KEY = "sk-benchmark-5d1c9e7f20b84a63"  # of gateways that live for one run on loopback
MODEL = "scripted"
PATHS: dict[Dialect, str] = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
HEADERS: dict[Dialect, dict[str, str]] = {
    "chat": {"authorization": f"Bearer {KEY}"},
    "messages": {"authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01"},
}
SENTENCES = (
    "A ship left the harbour before dawn and reached the northern cape by noon.",
    "The log of the voyage counts forty barrels of water and nine of salted fish.",
    "Nobody aboard had seen the island, though three charts agreed on where it lay.",
    "On the fifth day the wind turned, and the crew shortened sail under heavy rain.",
)


def request_body(dialect: Dialect, model: str, num_bytes: int) -> bytes:
    """A whole, not streamed, request of exactly `num_bytes`, which must be 200 or more."""
    wanted = {"model": model, "max_tokens": 64, "messages": [{"role": "user", "content": ""}]}
    num_prompt = num_bytes - len(json.dumps(wanted))
    sentences = " ".join(SENTENCES) + " "
    prompt = (sentences * (num_prompt // len(sentences) + 1))[:num_prompt]
    return json.dumps({**wanted, "messages": [{"role": "user", "content": prompt}]}).encode()


def answer_body(dialect: Dialect, num_tokens: int = 20) -> bytes:
    """What OpenAI or Anthropic would answer."""
    if dialect == "chat":
        message = {"role": "assistant", "content": ANSWER}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {
            "prompt_tokens": 60,
            "completion_tokens": num_tokens,
            "total_tokens": 60 + num_tokens,
        }
        body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}
        return json.dumps({**body, "choices": [choice], "usage": usage}).encode()
    content = [{"type": "text", "text": ANSWER}]
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL}
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    usage = {"input_tokens": 60, "output_tokens": num_tokens}
    return json.dumps({**body, "content": content, **end, "usage": usage}).encode()

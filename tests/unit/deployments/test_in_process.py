"""A real model, the real engine and the real router in one process, without Ray."""

from pathlib import Path

import anthropic
import pytest
import torch

from deployments.in_process import serve_model
from router.client import FlashrayClient
from tests.fakes.checkpoint import tiny_checkpoint


def test_a_model_path_is_all_it_takes(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FLASHRAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    tiny_checkpoint(folder, torch.float32, max_position_embeddings=4096)
    question = [{"role": "user", "content": "hi"}]
    with FlashrayClient("local", local_model_path=folder, serve_model=serve_model) as client:
        model = next(iter(client.models.list())).id
        message = client.messages.create(model=model, max_tokens=4, messages=question)
        with client.messages.stream(model=model, max_tokens=4, messages=question) as events:
            streamed = events.get_final_message()
    assert message.usage.output_tokens == streamed.usage.output_tokens == 4
    with pytest.raises((anthropic.APIConnectionError, RuntimeError)):
        client.messages.create(model=model, max_tokens=4, messages=question)

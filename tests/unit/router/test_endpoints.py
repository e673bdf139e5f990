"""Both dialects over a real socket, read by the official SDKs; the backend is scripted."""

import asyncio
import threading
import time
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from router.config import RouterConfig
from router.errors import BackendError, BackendUnavailable, InvalidRequest
from router.text.tokenizer import Tokenizer
from tests.fakes.backend import FakeBackend
from tests.fakes.router import ALIAS, KEY, MODEL, router_app, served

END = 2  # <|im_end|>
ANSWER = "Paris is the capital of France — 巴黎 🗼, of course."
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OLD = {"anthropic-version": "2023-06-01"}


@pytest.fixture
def backend(smollm2_path: Path) -> FakeBackend:
    ids = Tokenizer.from_folder(smollm2_path).encode(ANSWER)
    return FakeBackend(token_ids=(*ids, END), cached_tokens=7)


@pytest.fixture
def url(smollm2_path: Path, backend: FakeBackend):
    with served(router_app(smollm2_path, backend, RouterConfig(keep_alive_s=0.2))) as url:
        yield url


@pytest.fixture
def claude(url: str):
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(url: str):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def wait_for(condition, timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.01)


def test_claude_whole(claude, backend):
    message = claude.messages.create(model=MODEL, max_tokens=99, messages=QUESTION)
    assert message.content[0].text == ANSWER
    assert message.stop_reason == "end_turn"
    prompt_tokens = len(backend.requests[0].prompt_token_ids)
    assert message.usage.input_tokens == prompt_tokens - 7
    assert message.usage.cache_read_input_tokens == 7
    assert message.usage.output_tokens == len(backend.token_ids)
    assert message._request_id.startswith("req_")
    assert backend.aborted == []


def test_claude_stream_is_the_whole_answer(claude):
    with claude.messages.stream(model=MODEL, max_tokens=99, messages=QUESTION) as stream:
        deltas = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(deltas) == message.content[0].text == ANSWER
    assert len(deltas) > 3
    assert message.stop_reason == "end_turn"


def test_claude_event_order(url):
    body = {"model": MODEL, "max_tokens": 99, "messages": QUESTION, "stream": True}
    headers = {"x-api-key": KEY, **OLD}
    answer = httpx.post(f"{url}/v1/messages", json=body, headers=headers)
    events = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert [event for event in events if event != "content_block_delta"] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert "no-transform" in answer.headers["cache-control"]
    assert answer.headers["request-id"]


def test_stop_string_ends_the_text_and_the_generation(claude, backend):
    message = claude.messages.create(
        model=MODEL, max_tokens=99, messages=QUESTION, stop_sequences=["capital of"]
    )
    assert message.content[0].text == "Paris is the "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "capital of")
    assert len(backend.aborted) == 1
    assert message.usage.output_tokens == backend.num_sent[backend.requests[0].request_id]


@pytest.mark.parametrize(("max_tokens", "text", "output"), [(3, "Paris is the", 3), (0, None, 0)])
def test_max_tokens(claude, max_tokens: int, text: str | None, output: int):
    message = claude.messages.create(model=MODEL, max_tokens=max_tokens, messages=QUESTION)
    assert message.stop_reason == "max_tokens"
    assert [block.text for block in message.content] == ([text] if text else [])
    assert message.usage.output_tokens == output


def test_context_that_runs_out_is_said(smollm2_path: Path, backend: FakeBackend):
    app = router_app(smollm2_path, backend, max_model_len=42)
    with served(app) as url, anthropic.Anthropic(base_url=url, api_key=KEY) as claude:
        message = claude.messages.create(model=MODEL, max_tokens=42, messages=QUESTION)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == 5
    assert backend.requests[0].sampling.max_tokens == 5


def test_count_tokens_equals_the_real_prompt(claude, backend):
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.")
    claude.messages.create(model=MODEL, max_tokens=1, messages=QUESTION, system="Be brief.")
    assert counted.input_tokens == len(backend.requests[0].prompt_token_ids)


def test_sampling_reaches_the_backend(claude, backend):
    claude.messages.create(
        model=MODEL,
        max_tokens=5,
        messages=QUESTION,
        extra_headers=OLD,
        extra_body={"temperature": 0, "top_k": 3, "top_p": 0.5},
    )
    sampling = backend.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 3, 0.5)
    assert sampling.stop_token_ids == (END,)
    assert backend.requests[0].cache_salt == "red"


def test_the_end_token_ends_nothing_where_it_is_ignored(gpt, backend):
    gpt.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert backend.requests[0].sampling.stop_token_ids == ()


def test_openai_whole_with_logprobs(gpt, backend):
    completion = gpt.chat.completions.create(
        model=ALIAS, messages=QUESTION, logprobs=True, top_logprobs=2, seed=5
    )
    choice = completion.choices[0]
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    shown = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert shown.decode() == ANSWER
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert completion.usage.prompt_tokens_details.cached_tokens == 7
    assert completion.usage.completion_tokens == len(backend.token_ids)
    assert backend.requests[0].sampling.seed == 5


def test_openai_stream_with_usage(gpt):
    stream = gpt.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 5
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_several_completions(gpt, backend, stream: bool):
    answer = gpt.chat.completions.create(model=MODEL, messages=QUESTION, n=3, stream=stream)
    texts = ["", "", ""]
    if stream:
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
    assert texts == [ANSWER] * 3
    seeds = {request.sampling.seed for request in backend.requests}
    ids = {request.request_id for request in backend.requests}
    assert (len(seeds), len(ids)) == (3, 3)


def test_models_in_both_dialects(claude, gpt):
    page = claude.models.list(limit=1)
    assert [model.id for model in page.data] == [MODEL]
    assert page.has_more
    assert [model.id for model in claude.models.list()] == [MODEL, ALIAS]
    assert claude.models.retrieve(ALIAS).max_input_tokens == 8192
    assert [model.id for model in gpt.models.list()] == [MODEL, ALIAS]
    assert gpt.models.retrieve(MODEL).owned_by == "flashray"


def test_open_routes_need_no_key(url, backend):
    assert httpx.head(url).status_code == 200
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{url}/readyz").status_code == 200
    backend.ready = False
    answer = httpx.get(f"{url}/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "loading")
    assert httpx.get(f"{url}/healthz").status_code == 200


def test_metrics_count_what_was_served(url, claude):
    claude.messages.create(model=MODEL, max_tokens=4, messages=QUESTION)
    httpx.post(f"{url}/v1/messages", headers={"x-api-key": KEY})
    text = httpx.get(f"{url}/metrics").text
    assert "flashray:generation_tokens_total 4.0" in text
    assert 'flashray:request_success_total{finished_reason="length"} 1.0' in text
    assert 'flashray:request_errors_total{status="400"} 1.0' in text
    assert "flashray:time_to_first_token_seconds_count 1.0" in text


def test_a_silent_stream_is_kept_alive(url, backend):
    backend.gate = asyncio.Semaphore(0)
    body = {"model": MODEL, "messages": QUESTION, "stream": True}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        first = next(answer.iter_raw())
        assert answer.status_code == 200
        assert first == b": ka\n"


def test_keep_alives_do_not_disturb_the_sdks(claude, gpt, backend):
    backend.gate = asyncio.Semaphore(0)
    opener = threading.Timer(0.5, lambda: [backend.gate.release() for _ in range(99)])
    opener.start()
    with claude.messages.stream(model=MODEL, max_tokens=99, messages=QUESTION) as stream:
        assert stream.get_final_text() == ANSWER
    stream = gpt.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == ANSWER
    opener.join()


def test_failure_before_content_has_its_own_status(claude, gpt, backend):
    backend.error, backend.fail_at = BackendUnavailable("restarting", retry_after_s=3), 0
    with pytest.raises(anthropic.InternalServerError) as claude_error:
        claude.messages.create(model=MODEL, max_tokens=9, messages=QUESTION, stream=True)
    assert claude_error.value.status_code == 503
    assert claude_error.value.response.headers["retry-after"] == "3"
    with pytest.raises(openai.InternalServerError, match="restarting"):
        gpt.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    assert len(backend.aborted) == 2


def test_failure_after_content_comes_in_the_stream(claude, gpt, backend):
    backend.error, backend.fail_at = BackendError("broke in the middle"), 1
    with (
        pytest.raises(anthropic.APIStatusError, match="broke in the middle"),
        claude.messages.stream(model=MODEL, max_tokens=9, messages=QUESTION) as stream,
    ):
        stream.get_final_message()
    with pytest.raises(openai.APIError, match="broke in the middle"):
        list(gpt.chat.completions.create(model=MODEL, messages=QUESTION, stream=True))


def test_what_the_backend_refuses_is_the_callers_error(claude, backend):
    backend.refuse = InvalidRequest("too long for this engine")
    with pytest.raises(anthropic.BadRequestError, match="too long for this engine"):
        claude.messages.create(model=MODEL, max_tokens=9, messages=QUESTION)


def test_a_reader_that_leaves_ends_its_generation(url, backend):
    backend.gate = asyncio.Semaphore(2)
    headers = {"authorization": f"Bearer {KEY}", **OLD}
    body = {"model": MODEL, "max_tokens": 99, "messages": QUESTION, "stream": True}
    with httpx.stream("POST", f"{url}/v1/messages", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    wait_for(lambda: len(backend.aborted) == 1, 1.0)


def test_a_whole_answer_nobody_waits_for_is_aborted(url, backend):
    backend.gate = asyncio.Semaphore(1)
    headers = {"authorization": f"Bearer {KEY}", **OLD}
    body = {"model": MODEL, "max_tokens": 99, "messages": QUESTION}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/messages", json=body, headers=headers, timeout=0.3)
    wait_for(lambda: len(backend.aborted) == 1, 1.0)


def test_the_sdks_tool_runner_learns_that_threads_are_not_kept(url):
    body = {
        "model": MODEL,
        "max_tokens": 9,
        "messages": QUESTION,
        "thread": {"type": "create"},
    }
    headers = {"authorization": f"Bearer {KEY}", **OLD}
    answer = httpx.post(f"{url}/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"

"""`make serve` as a user runs it: real weights, the official SDKs, Ctrl-C."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import psutil
import pytest
import torch

from cluster.bringup import free_port

pytestmark = [pytest.mark.ray, pytest.mark.model]

ROOT = Path(__file__).parents[2]
KEY = "sk-demo-123"
OLD = {"anthropic-version": "2023-06-01"}
START_TIMEOUT_S = 180
SERVE = [sys.executable, "-m", "deployments.cli", "serve"]


class Served:
    """A `flashray serve` of its own, in a process group as a terminal gives it one."""

    def __init__(self, log: Path, config: Path | None = None, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                ["make", "serve", f"PORT={self.port}"]
                if config is None
                else [*SERVE, "--port", str(self.port), "--config", str(config)],
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "FLASHRAY_DEMO_KEY": KEY, **environment},
            )

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/readyz").status_code == 200:
                    return
            time.sleep(0.3)
        pytest.fail(f"not ready in {START_TIMEOUT_S} s:\n{self.log.read_text()}")

    def wait_log(self, words: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while words not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.1)

    def tree(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def interrupt(self) -> list[psutil.Process]:
        """Ctrl-C: what is left of the process tree afterwards."""
        return self._left_after(lambda: os.killpg(self.process.pid, signal.SIGINT))

    def terminate(self) -> list[psutil.Process]:
        """As `interrupt`, as a service manager does it."""
        return self._left_after(self.process.terminate)

    def _left_after(self, end: Callable[[], None]) -> list[psutil.Process]:
        tree = self.tree()
        assert len(tree) > 5
        end()
        self.process.wait(60)
        _, alive = psutil.wait_procs(tree, timeout=5)
        return alive

    def close(self) -> None:
        if self.process.poll() is None:
            for process in reversed(self.tree()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait(10)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("serve") / "log"
    served = Served(log, RAY_ADDRESS="10.1.2.3:6379")
    try:
        served.wait_ready()
        yield served
    finally:
        served.close()


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key=KEY) as client:
        yield client


@pytest.fixture
def gpt(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def greedy(smollm2_path: Path):
    """Hugging Face's own greedy answer, as text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)

    def answer(messages: list[dict], max_tokens: int) -> str:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**ids, max_new_tokens=max_tokens, do_sample=False)
        return tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def ask(claude: anthropic.Anthropic, messages: list[dict], max_tokens: int = 48):
    return claude.messages.create(
        model="smollm2-135m-instruct",
        max_tokens=max_tokens,
        messages=messages,
        extra_headers=OLD,
        extra_body={"temperature": 0},
    )


CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = [
    CAPITAL,
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is water wet? 💧"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada."},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Count: " + " ".join(str(n) for n in range(300))}],
]


def test_paris_from_both_sdks_whole_and_streamed(claude, gpt):
    assert "Paris" in ask(claude, CAPITAL).content[0].text
    with claude.messages.stream(
        model="smollm2-135m-instruct",
        max_tokens=48,
        messages=CAPITAL,
        extra_headers=OLD,
        extra_body={"temperature": 0},
    ) as stream:
        assert "Paris" in "".join(stream.text_stream)
    chat = {"model": "smollm2-135m-instruct", "temperature": 0, "messages": CAPITAL}
    whole = gpt.chat.completions.create(**chat)
    assert "Paris" in whole.choices[0].message.content
    chunks = gpt.chat.completions.create(**chat, stream=True)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_answers_are_hugging_faces_greedy_ones(claude, gpt, greedy, number: int):
    messages = PROMPTS[number]
    expected = greedy(messages, 48)
    assert ask(claude, messages).content[0].text == expected
    answer = gpt.chat.completions.create(
        model="smollm2-135m-instruct", max_tokens=48, temperature=0, messages=messages
    )
    assert answer.choices[0].message.content == expected


def test_a_second_long_request_reports_cached_tokens(claude, gpt):
    long = [{"role": "user", "content": "Summarise: " + "the quick brown fox jumps. " * 60}]
    first = ask(claude, long, 8)
    again = ask(claude, long, 8)
    assert first.usage.cache_read_input_tokens == 0
    assert again.usage.cache_read_input_tokens > 200
    total = first.usage.input_tokens
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == total
    assert again.content == first.content
    usage = gpt.chat.completions.create(
        model="smollm2-135m-instruct", max_tokens=8, messages=long
    ).usage
    assert usage.prompt_tokens_details.cached_tokens > 200
    assert usage.prompt_tokens == total


def test_the_banner_says_what_one_needs(served: Served):
    log = served.log.read_text()
    assert f"URL        {served.url}" in log
    assert KEY in log
    assert f"curl {served.url}/v1/messages" in log
    assert "RAY_ADDRESS=10.1.2.3:6379 is ignored" in log


def test_chat_talks_to_it(served: Served):
    ran = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "chat", "--url", served.url, "--key", KEY],
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout) > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--key", "wrong"], "answered 401"),
        ([], "chat needs a key"),
        (["--key", "k", "--url", "http://127.0.0.1:9"], "cannot be reached"),
    ],
)
def test_chat_says_what_is_wrong(served: Served, arguments: list[str], words: str):
    command = [sys.executable, "-m", "deployments.cli", "chat", "--url", served.url, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "FLASHRAY_DEMO_KEY"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 1
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_taken_port_is_said_before_anything_starts(served: Served):
    ran = subprocess.run(
        [*SERVE, "--port", str(served.port)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert ran.returncode == 1
    assert f"port {served.port}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_engine_that_cannot_start_says_why(tmp_path: Path):
    config = tmp_path / "app.yaml"
    config.write_text("engine: {kv_cache_gib: 0.001}\n")
    command = [*SERVE, "--port", str(free_port()), "--config", str(config)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=START_TIMEOUT_S)
    assert ran.returncode == 1
    assert "the app did not come up: rank 0 of 1 did not start: CacheTooSmall: " in ran.stderr
    assert "kv_cache_bytes is 1073741; raise it or lower max_model_len" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_two_instances_side_by_side_and_term_ends_only_its_own(
    served: Served, claude, tmp_path: Path
):
    """The second one's cache ages."""
    config = tmp_path / "app.yaml"
    config.write_text("engine: {kv_tiers: {cold_format: int4}, max_model_len: 2048}\n")
    second = Served(tmp_path / "log", config)
    try:
        second.wait_ready()
        with anthropic.Anthropic(base_url=second.url, api_key=KEY) as other:
            assert "Paris" in ask(other, CAPITAL).content[0].text
        second.wait_log("] ready")
        assert second.terminate() == []
        assert "stopped" in second.log.read_text()
        assert "Paris" in ask(claude, CAPITAL).content[0].text
    finally:
        second.close()


def test_ctrl_c_during_start_leaves_nothing(tmp_path: Path):
    early = Served(tmp_path / "log")
    try:
        early.wait_log("starting the engine")
        assert early.interrupt() == []
        assert "Traceback" not in early.log.read_text()
    finally:
        early.close()


def test_zz_after_ctrl_c_nothing_is_left(served: Served):
    assert served.interrupt() == []
    assert "stopped" in served.log.read_text()

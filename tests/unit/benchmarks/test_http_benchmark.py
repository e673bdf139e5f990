"""The benchmark over HTTP: its model folder, traffic and arithmetic, and a run on a fake server."""

import argparse
import json
import random
import statistics
from pathlib import Path

import pytest

from benchmarks.errors import MeasurementFailed
from benchmarks.http.__main__ import TINY, HttpRun
from benchmarks.http.bars import rows_of
from benchmarks.http.client import Answer
from benchmarks.http.model_folder import words, write_model_folder
from benchmarks.http.rounds import Round, summary
from benchmarks.http.servers import Setting, flashray_settings
from benchmarks.http.stream import Arrival, Timing, timing
from benchmarks.http.traffic import answer_length, prompt_length, requests
from benchmarks.load import ExchangeFailed
from deployments.config import AppConfig
from router.chat import ChatMessage
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer

PEER_SITE = Path(__file__).parents[2] / "fakes" / "peer_site"
TEMPLATE_TOKENS = 4  # of a conversation of one message


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model_folder(TINY, tmp_path_factory.mktemp("model"), 1024)


def test_every_word_is_one_token_in_both_readings_of_the_folder(folder):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    vocabulary = words(TINY.vocab_size)
    assert ours.vocabulary_size == len(theirs) == TINY.vocab_size
    assert len(set(vocabulary)) == len(vocabulary) > 1000
    text = "".join(random.Random(0).sample(vocabulary, len(vocabulary)))
    assert len(ours.encode(text)) == len(vocabulary)
    assert ours.decode(ours.encode(text)) == text
    template = ChatTemplate.from_folder(folder, ours.special_tokens)
    token_ids = ours.encode(template.render([ChatMessage("user", text)]))
    conversation = [{"role": "user", "content": text}]
    assert (
        token_ids
        == theirs.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    )
    assert len(token_ids) == len(vocabulary) + TEMPLATE_TOKENS


def test_the_config_names_the_special_tokens_of_the_tokenizer(folder):
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_folder(folder)
    assert config["eos_token_id"] == tokenizer.token_id(tokenizer.special_tokens["eos_token"])
    assert config["bos_token_id"] == tokenizer.token_id(tokenizer.special_tokens["bos_token"])


def test_lengths_have_the_means_that_are_claimed():
    draw = random.Random(0)
    assert statistics.fmean(prompt_length(draw) for _ in range(50_000)) == pytest.approx(217, 0.03)
    assert statistics.fmean(answer_length(draw) for _ in range(50_000)) == pytest.approx(199, 0.03)


def test_traffic_is_the_same_for_the_same_seed_alone():
    vocabulary = words(TINY.vocab_size)
    first = requests(vocabulary, 20, seed=1)
    assert first == requests(vocabulary, 20, seed=1)
    assert first != requests(vocabulary, 20, seed=2)
    assert all(
        4 <= each.num_tokens <= 640 and 4 <= each.prompt.count(" ") <= 1024 for each in first
    )


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(content: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content}}])


WHOLE = b"".join(
    [
        text_event(""),
        text_event(" baba"),
        b": ka\n",
        text_event(" be\n\nbe"),
        event(choices=[], usage={"completion_tokens": 3}),
        b"data: [DONE]\n\n",
    ]
)


@pytest.mark.parametrize("size", [1, 7, 64, len(WHOLE)])
def test_a_stream_is_read_however_it_is_cut(size):
    chunks = tuple((float(at), WHOLE[at : at + size]) for at in range(0, len(WHOLE), size))
    read = timing(Arrival(-1.0, chunks, num_tokens=3))
    assert len(read.text_s) == 2
    assert read.num_tokens == 3
    assert read.ttft_ms >= 1e3
    if size == 1:  # the byte that ends the event
        assert read.text_s[0] == len(text_event("")) + len(text_event(" baba")) - 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (WHOLE.replace(b": 3}", b": 2}"), "expected 3 tokens, got 2"),
        (WHOLE.replace(b"data: [DONE]\n\n", b""), "ended: False"),
        (event(usage={"completion_tokens": 3}) + b"data: [DONE]\n\n", "in 0 events"),
        (event(error={"message": "it broke"}), "it broke"),
    ],
)
def test_a_stream_that_did_other_work_failed(content, words):
    with pytest.raises(ExchangeFailed, match=words):
        timing(Arrival(0.0, ((1.0, content),), num_tokens=3))


def test_rates_are_of_the_time_when_every_sender_was_busy():
    early = Timing(0.0, (0.5, 1.5, 2.5, 3.5), num_tokens=8)  # too slow to be good
    late = Timing(2.0, (2.04, 2.08, 9.0), num_tokens=300)  # 23 ms a token
    measured = summary([Answer(4.0, [early]), Answer(9.0, [late], ["refused"])], start_s=1.0)
    assert measured.tok_s == pytest.approx((8 * 3 / 4 + 300 * 2 / 3) / 3)
    assert measured.goodput == pytest.approx(300 * 2 / 3 / 3)
    assert measured.ttft_p50_ms == pytest.approx((500 + 40) / 2)
    assert (measured.num_requests, measured.num_failed) == (3, 1)
    assert measured.tokens_an_event == pytest.approx(308 / 7)
    with pytest.raises(MeasurementFailed, match="refused"):
        summary([Answer(4.0, [], ["refused"])], start_s=1.0)


def a_round(value: float, num_failed: int = 0) -> Round:
    return Round(value, value, value, value, value, value, 1.0, 10, num_failed, ())


def test_bars_are_on_the_cases_that_were_promised():
    ours = {each: [a_round(2.0), a_round(9.0), a_round(3.0)] for each in (1, 32, 128)}
    rows = list(rows_of(ours, "vllm 0", {each: [a_round(6.0)] for each in (1, 32)}))
    assert {row.case for row in rows if row.floor_of == "ratio" and row.floor} == {
        "http_goodput_c1",
        "http_goodput_c32",
        "http_goodput_c128",
        "http_itl_p99_c32",
        "http_ttft_p50_c1",
    }
    by_case = {row.case: row for row in rows}
    assert by_case["http_goodput_c32"].ratio == pytest.approx(0.5)
    assert by_case["http_itl_p99_c32"].meets_floor
    assert by_case["http_goodput_c128"].meets_floor is None
    assert by_case["http_failed_c1"].meets_floor


def test_our_settings_are_settings(tmp_path):
    setting = Setting(tmp_path, "cuda", 8192, 48.0, router_replicas=2)
    config = AppConfig.model_validate(flashray_settings(setting, "key"))
    assert config.engine.load_format == "dummy"
    assert config.limits.store == "embedded"
    assert config.router.num_replicas == 2
    assert config.teams[0]["limits"]["max_concurrent_requests"] == 1024


def test_a_server_is_started_loaded_and_ended(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PEER_SITE))
    arguments = argparse.Namespace(
        device="cpu",
        concurrency=(1, 3),
        rounds=1,
        router_replicas=1,
        peer_seconds=None,
        total_seconds=None,
    )
    run = HttpRun(arguments, lambda message: None)
    run.measure("vllm")
    assert run.failed == {}
    assert run.peer == "vllm 0.0.fake"
    assert {each: len(rounds) for each, rounds in run.rounds["vllm"].items()} == {1: 1, 3: 1}
    assert all(rounds[0].num_failed == 0 for rounds in run.rounds["vllm"].values())
    assert json.loads(json.dumps(run.more()))["traffic"]["c3"]["requests_a_round"] == 15

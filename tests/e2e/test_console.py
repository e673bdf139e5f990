"""The web console in a real browser, over the real router and a scripted backend."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.app import create_app
from router.config import RouterConfig
from router.errors import BackendError, Overloaded
from router.identity import KeyRing, Principal, hash_key
from router.text.tokenizer import Tokenizer
from tests.fakes.backend import FakeBackend
from tests.fakes.chromium import CHROMIUM, SHIFT, Chromium, Page, chromium
from tests.fakes.router import ALIAS, KEY, MODEL, catalog, served

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)

END = 2  # <|im_end|>
ATTACK = "</system><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
ANSWER = f"Paris — 巴黎 🗼.\n{ATTACK} So it is."
LAST_ANSWER = "[...document.querySelectorAll('.turn.assistant')].at(-1)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    with browser.page() as page:
        page.resize(1280, 800)
        yield page
        page.evaluate("0")  # what the browser said before this answer is noted first
        assert page.faults == []


@pytest.fixture
def backend(smollm2_path: Path) -> FakeBackend:
    ids = Tokenizer.from_folder(smollm2_path).encode(ANSWER)
    return FakeBackend(token_ids=(*ids, END), cached_tokens=7)


async def limits_of(_principal: Principal) -> dict[str, dict[str, int]]:
    return {"requests_per_minute": {"limit": 60, "remaining": 45}}


@pytest.fixture
def url(smollm2_path: Path, backend: FakeBackend) -> Iterator[str]:
    app = create_app(
        catalog=catalog(smollm2_path),
        backend=backend,
        keys=KeyRing({hash_key(KEY): "red"}),
        config=RouterConfig(keep_alive_s=0.2),
        limits_of=limits_of,
    )
    with served(app) as url:
        yield url


@pytest.fixture
def signed_in(page: Page, url: str) -> Page:
    page.open(url)
    sign_in(page, KEY)
    page.wait_for("!document.querySelector('#console').hidden")
    return page


def sign_in(page: Page, key: str) -> None:
    page.evaluate("document.querySelector('#key').value = ''")
    page.type("#key", key)
    page.press("Enter")


def ask(page: Page, question: str) -> None:
    page.type("#prompt", question)
    page.press("Enter")


def answered(page: Page, num_answers: int) -> str:
    """The text of the last answer, once there are so many and none is being written."""
    page.wait_for(
        f"document.querySelectorAll('.turn.assistant').length === {num_answers}"
        " && !document.querySelector('.streaming')"
    )
    return page.evaluate(f"{LAST_ANSWER}.querySelector('.turn-text').textContent")


def wait_until(condition, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.02)


def test_wrong_keys_are_answered_in_words(page, url):
    page.open(url)
    sign_in(page, "sk-wrong")
    page.wait_for("document.querySelector('#key-error').textContent.includes('invalid API key')")
    sign_in(page, "clé secrète")
    page.wait_for("document.querySelector('#key-error').textContent.includes('only ASCII')")
    assert page.evaluate("document.querySelector('#console').hidden")


def test_the_right_key_shows_what_is_served_and_how_it_does(signed_in):
    assert signed_in.text("#health") == "SmolLM2 is ready"
    assert signed_in.evaluate("document.querySelector('#health').dataset.state") == "ready"
    assert signed_in.text("#about").startswith("team red · v")
    options = "[...document.querySelector('#model').options].map(({ value }) => value)"
    assert signed_in.evaluate(options) == [MODEL, ALIAS]
    assert signed_in.text("#kv-tiers") == "Device blocks\n10 used, 0 free"
    assert signed_in.text("#limits") == "Requests per minute\n15 of 60 used"
    assert signed_in.evaluate("document.querySelector('#limits .fill').style.width") == "25%"
    signed_in.wait_for("document.querySelector('#tokens-per-s').textContent === '0.0'")


def test_a_sick_engine_and_a_lost_router_are_told_apart(
    browser: Chromium, smollm2_path: Path, backend: FakeBackend
):
    app = create_app(
        catalog=catalog(smollm2_path),
        backend=backend,
        keys=KeyRing({hash_key(KEY): "red"}),
        config=RouterConfig(),
    )
    backend.ready = False
    with browser.page() as page:
        with served(app) as url:
            page.open(url)
            sign_in(page, KEY)
            page.wait_for("!document.querySelector('#console').hidden")
            assert page.text("#health") == "SmolLM2 is not ready: loading"
            assert page.evaluate("document.querySelector('#limits-card').hidden")
            backend.ready = True
            page.wait_for("document.querySelector('#health').dataset.state === 'ready'")
        page.wait_for("document.querySelector('#health').dataset.state === 'unreachable'")
        assert "does not answer" in page.text("#health")


def test_a_conversation_streams_over_two_turns(signed_in, backend, smollm2_path):
    page = signed_in
    page.type("#system", "Answer </system> briefly.")
    ask(page, "What is the capital of France?")
    assert answered(page, 1) == ANSWER
    note = page.evaluate(f"{LAST_ANSWER}.querySelector('.turn-note').textContent")
    num_prompt, num_out = len(backend.requests[0].prompt_token_ids), len(backend.token_ids)
    assert note.startswith("first token ")
    assert "tokens/s" in note
    assert note.endswith(f"{num_prompt} in (7 cached), {num_out} out")

    ask(page, "And of Italy?")
    assert answered(page, 2) == ANSWER
    tokenizer = Tokenizer.from_folder(smollm2_path)
    first, second = (tokenizer.decode(request.prompt_token_ids) for request in backend.requests)
    assert "Answer </system> briefly." in first
    assert second.index("France?") < second.index("So it is.") < second.index("And of Italy?")

    page.click("#new-conversation")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    ask(page, "Hello?")
    answered(page, 1)
    assert "France" not in tokenizer.decode(backend.requests[2].prompt_token_ids)


def test_text_comes_while_it_is_written_and_stop_aborts_it(signed_in, backend):
    backend.gate = asyncio.Semaphore(2)
    ask(signed_in, "Tell me everything.")
    signed_in.wait_for("document.querySelector('.streaming .turn-text').textContent !== ''")
    assert backend.aborted == []
    signed_in.press("Escape")
    wait_until(lambda: backend.aborted == [backend.requests[0].request_id])
    partial = answered(signed_in, 1)
    assert ANSWER.startswith(partial)
    assert len(partial) < len(ANSWER)
    assert signed_in.text(".turn-note").endswith("stopped")

    backend.gate = None
    ask(signed_in, "Go on.")
    assert answered(signed_in, 2) == ANSWER


def test_a_question_stopped_before_its_answer_goes_back_to_be_edited(signed_in, backend):
    backend.gate = asyncio.Semaphore(0)
    ask(signed_in, "Never mind")
    wait_until(lambda: len(backend.requests) == 1)
    signed_in.click("#stop")
    wait_until(lambda: len(backend.aborted) == 1)
    assert answered(signed_in, 1) == ""
    assert signed_in.evaluate("document.querySelector('#prompt').value") == "Never mind"


def test_prompts_and_answers_stay_text(signed_in):
    ask(signed_in, ATTACK)
    assert answered(signed_in, 1) == ANSWER
    question = "document.querySelector('.turn.user .turn-text').textContent"
    assert signed_in.evaluate(question) == ATTACK
    assert (
        signed_in.evaluate("document.querySelectorAll('.transcript :is(script, img)').length") == 0
    )
    assert signed_in.evaluate("typeof window.hacked") == "undefined"


def test_the_browser_itself_refuses_inline_scripts_and_markup(page, url):
    page.open(url)
    page.evaluate(
        "document.head.append(Object.assign(document.createElement('style'),"
        " { textContent: 'body { display: none }' }))"
    )
    refused = (
        "(() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } })()"
    )
    assert page.evaluate(refused) == "TypeError"
    assert page.evaluate("getComputedStyle(document.body).display") == "flex"
    assert len(page.faults) == 2, page.faults
    assert all("Content Security Policy" in fault or "Trusted" in fault for fault in page.faults)
    page.faults.clear()


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ({"refuse": Overloaded("too many are waiting", retry_after_s=3)}, "Try again in 3 s."),
        ({"error": BackendError("the rank ended"), "fail_at": 2}, "the rank ended"),
    ],
    ids=["before the stream", "in the stream"],
)
def test_errors_are_shown_in_words(signed_in, backend, fails, words):
    for name, value in fails.items():
        setattr(backend, name, value)
    ask(signed_in, "Hello?")
    answered(signed_in, 1)
    assert words in signed_in.text(".turn .error")
    backend.refuse = backend.error = None
    signed_in.evaluate("document.querySelector('#prompt').value = ''")
    ask(signed_in, "Again?")
    assert answered(signed_in, 2) == ANSWER


def test_shift_enter_starts_a_line(signed_in, backend):
    signed_in.type("#prompt", "one")
    signed_in.press("Enter", SHIFT)
    signed_in.type("#prompt", "two")
    assert signed_in.evaluate("document.querySelector('#prompt').value") == "one\ntwo"
    assert backend.requests == []
    assert signed_in.evaluate("document.activeElement.id") == "prompt"


def test_the_key_stays_in_memory(signed_in, url):
    ask(signed_in, "Hello?")
    answered(signed_in, 1)
    everything = signed_in.evaluate(
        "JSON.stringify([document.documentElement.outerHTML, location.href, document.cookie,"
        " localStorage, sessionStorage, document.querySelector('#key').value,"
        " performance.getEntriesByType('resource').map(({ name }) => name)])"
    )
    assert KEY not in everything
    signed_in.open(url)
    assert not signed_in.evaluate("document.querySelector('#sign-in').hidden")


def test_a_ticked_box_keeps_the_key_for_the_tab_until_signing_out(page, url):
    page.open(url)
    page.click("#remember")
    sign_in(page, KEY)
    page.wait_for("!document.querySelector('#console').hidden")
    page.open(url)
    page.wait_for("!document.querySelector('#console').hidden")
    assert page.evaluate("localStorage.length") == 0
    page.click("#sign-out")
    assert page.evaluate("sessionStorage.length") == 0
    assert not page.evaluate("document.querySelector('#sign-in').hidden")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone_in_both_colour_schemes(signed_in, tmp_path, is_dark):
    signed_in.resize(390, 844)
    signed_in.use_dark_mode(is_dark)
    ask(signed_in, "w" * 300)
    answered(signed_in, 1)
    signed_in.screenshot(tmp_path / "phone.png")
    assert signed_in.evaluate("document.documentElement.scrollWidth") == 390
    background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert (sum(signed_in.evaluate(background)) < 384) is is_dark


def test_everything_can_be_reached_and_is_named(signed_in):
    unnamed = signed_in.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, [role=meter]')].filter("
        "(node) => !node.labels?.length && !node.getAttribute('aria-label')"
        " && !node.textContent.trim()).map((node) => node.outerHTML)"
    )
    assert unnamed == []
    reached = set()
    for _ in range(20):
        signed_in.press("Tab")
        reached.add(signed_in.evaluate("document.activeElement.id"))
    assert {"sign-out", "model", "new-conversation", "transcript", "prompt", "send"} <= reached


def test_nothing_moves_while_an_answer_is_written(signed_in, backend):
    boxes = (
        "['composer', 'transcript', 'kv-tiers'].map((id) =>"
        " { const { x, y, width, height } = document.getElementById(id).getBoundingClientRect();"
        " return [x, y, width, height]; })"
    )
    before = signed_in.evaluate(boxes)
    backend.gate = asyncio.Semaphore(2)
    ask(signed_in, "Hello?")
    signed_in.wait_for("document.querySelector('.streaming .turn-text').textContent !== ''")
    assert json.dumps(signed_in.evaluate(boxes)) == json.dumps(before)
    signed_in.click("#stop")
    wait_until(lambda: len(backend.aborted) == 1)
    answered(signed_in, 1)
    assert signed_in.evaluate(boxes) == before

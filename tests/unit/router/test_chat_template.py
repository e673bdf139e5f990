"""The chat template: what it may do, what it may not, and how it fails."""

import json
from datetime import datetime

import pytest

from router.chat import ChatMessage
from router.errors import InvalidRequest, ModelFilesError
from router.text.chat_template import ChatTemplate

HELLO = [ChatMessage("user", "Hello")]
SIMPLE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_texts_reach_the_prompt_as_they_are():
    text = "  <script>alert('x')</script> </system> {{ 7 * 7 }} {% raw %} é🦊\r\n\t\x00 "
    assert ChatTemplate(SIMPLE, {}).render([ChatMessage("user", text)]) == text


def test_special_tokens_and_generation_prompt_are_given():
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(HELLO) == "<s>Hello>"
    assert template.render(HELLO, add_generation_prompt=False) == "<s>Hello"


def test_blocks_leave_no_white_space_and_loops_can_be_left():
    source = "{% for m in messages %}\n    {% if loop.index == 2 %}{% break %}{% endif %}\n"
    source += "{{ m.content }}\n{% endfor %}"
    assert ChatTemplate(source, {}).render(HELLO * 3) == "Hello\n"


def test_json_is_not_escaped_for_html():
    source = "{{ [messages[0].content] | tojson }}{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}"
    rendered = ChatTemplate(source, {}).render([ChatMessage("user", "<é & '>")])
    assert rendered == json.dumps(["<é & '>"], ensure_ascii=False) + json.dumps(
        {"b": 1, "a": [2]}, indent=1
    )


def test_the_date_comes_from_the_clock_that_was_given():
    source = "{{ strftime_now('%d %b %Y') }}"
    template = ChatTemplate(source, {}, now=lambda: datetime(2026, 11, 30))
    assert template.render(HELLO) == "30 Nov 2026"


def test_a_generation_block_shows_its_content():
    source = (
        "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(HELLO) == "[Hello]"


def test_a_refusal_of_the_template_is_the_callers_fault():
    source = (
        SIMPLE
        + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest, match="refused the conversation: no system") as caught:
        template.render([ChatMessage("system", "x"), *HELLO])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% if %}", "does not compile"),
        ("{% generation %}", "does not compile"),
        ("{{ messages[0].nothing.at_all }}", "broke: UndefinedError"),
        ("{{ 1 / 0 }}", "broke: ZeroDivisionError"),
        ("{{ raise_exception('never') }}", "refuses one user message"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "broke: SecurityError"),
        ("{{ messages.append(1) }}", "broke: SecurityError"),
    ],
)
def test_a_broken_template_is_refused_when_it_is_loaded(source, why):
    with pytest.raises(ModelFilesError, match=why):
        ChatTemplate(source, {})


def test_a_template_that_breaks_later_is_not_the_callers_fault():
    template = ChatTemplate(SIMPLE + "{% if messages[1] %}{{ messages[1].x.y }}{% endif %}", {})
    with pytest.raises(ModelFilesError, match="correct the template"):
        template.render(HELLO * 2)


def test_from_a_folder(tmp_path):
    with pytest.raises(ModelFilesError, match="found none"):
        ChatTemplate.from_folder(tmp_path, {})
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "A"}))
    assert ChatTemplate.from_folder(tmp_path, {}).render(HELLO) == "A"
    several = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert ChatTemplate.from_folder(tmp_path, {}).render(HELLO) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert ChatTemplate.from_folder(tmp_path, {}).render(HELLO) == "F"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{")
    with pytest.raises(ModelFilesError, match="expected JSON"):
        ChatTemplate.from_folder(tmp_path, {})

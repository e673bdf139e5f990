"""A model's chat template: messages in, prompt text out.

Rendering is that of transformers' `apply_chat_template`, which a contract test holds it to. The
template is a program from a model folder: it runs in a sandbox.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.chat import ChatMessage
from router.errors import InvalidRequest, ModelFilesError
from router.text.model_folder import read_json

_PROBE = (ChatMessage("user", "probe"),)


class ChatTemplate:
    """Raises ModelFilesError at construction when the template does not compile or cannot render
    even one user message."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as exc:
            raise ModelFilesError(f"the chat template does not compile: {exc}") from exc
        self._probe()

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        """From chat_template.jinja, or from `chat_template` in tokenizer_config.json."""
        return cls(_read_source(folder), special_tokens)

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """Texts go into the prompt as they are. Raises InvalidRequest with the template's own
        words when it refuses the conversation, ModelFilesError when it breaks on it."""
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.text} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _Refusal as exc:
            raise InvalidRequest(
                f"messages: the model's chat template refused the conversation: {exc}",
                param="messages",
            ) from exc
        # A template is a program: it can break with any exception Python has.
        except Exception as exc:
            raise ModelFilesError(
                f"the chat template broke: {type(exc).__name__}: {exc}; correct the template"
            ) from exc

    def _probe(self) -> None:
        try:
            self.render(_PROBE)
        except InvalidRequest as exc:
            raise ModelFilesError(f"the chat template refuses one user message: {exc}") from exc


class _Refusal(TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's own words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _read_source(folder: Path) -> str:
    template_path = folder / "chat_template.jinja"
    if template_path.exists():
        return template_path.read_text(encoding="utf-8")
    config_path = folder / "tokenizer_config.json"
    source = read_json(config_path).get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ModelFilesError(
            f"expected a chat template in {template_path} or as `chat_template` in {config_path}, "
            "found none; serve an instruction-tuned model"
        )
    return source

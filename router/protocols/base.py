"""What the two dialects have in common: how a body is checked, how a stream is written."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from router.errors import InvalidRequest, RouterError
from router.events import TextEvent
from router.generation import Grammar, GrammarKind
from router.sse.codec import ServerSentEvent

# A stop string costs memory for each of its characters, on every request that carries it.
MAX_STOP_CHARACTERS = 16_384
# The engine refuses longer ones; here, before anything is counted or sent.
MAX_GRAMMAR_CHARACTERS = 1 << 16
# The engine wants top_p above 0; this small, it keeps the most likely token alone, as 0 means.
MIN_TOP_P = 1e-6

# A field name or a value of the client's comes back to it in an error, however long it was.
MAX_QUOTED_CHARACTERS = 1_000

Model = TypeVar("Model", bound=BaseModel)

json_string = json.JSONEncoder(ensure_ascii=False).encode
"""A text as JSON, as `json.dumps` has it: for frames of which nothing else changes."""


class StreamEncoder(Protocol):
    """A pure fold from the text events of a request to the events its client reads.

    `choice_index` is 0 where a dialect has one completion per request.
    """

    def encode(self, choice_index: int, event: TextEvent) -> list[ServerSentEvent]: ...

    def error(self, error: RouterError) -> list[ServerSentEvent]:
        """The end of a stream that broke: nothing may follow."""
        ...


class Fields(BaseModel):
    """JSON types are not converted, unknown fields are refused, numbers are finite. A null
    optional field is an absent one."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """The first field of a body that is wrong. `path` holds field names and list positions; `kind`
    is pydantic's name of the fault."""

    path: tuple[int | str, ...]
    kind: str
    message: str


def check_body(
    model: type[Model], body: bytes, refuse: Callable[[Problem], InvalidRequest]
) -> Model:
    """Raises InvalidRequest for what is not a JSON object, and what `refuse` makes of the first
    problem."""
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        details = exc.errors(include_url=False, include_input=False)[0]
    # Raised outside the handler: pydantic's error quotes the body, which must not reach a log.
    if details["type"] == "json_invalid":
        raise InvalidRequest(f"The request body is not valid JSON: {details['ctx']['error']}")
    if details["loc"] == ():
        raise InvalidRequest("The request body must be a JSON object")
    raise refuse(_problem(details))


STRING_FORM = "<string>"
LIST_FORM = "<list>"
# Steps that pydantic puts into a path and no client wrote.
_FOREIGN_STEPS = frozenset({STRING_FORM, LIST_FORM, "[key]"})


def content_form(content: object) -> str:
    """The tag of a field that is a string or a list."""
    return STRING_FORM if isinstance(content, str) else LIST_FORM


def _problem(details: ErrorDetails) -> Problem:
    loc, message = details["loc"], details["msg"]
    if loc[-1] == LIST_FORM and details["type"] == "list_type":
        message = "Input should be a string or an array"
    path = tuple(_short(step) for step in loc if step not in _FOREIGN_STEPS)
    return Problem(path, details["type"], message[:MAX_QUOTED_CHARACTERS])


def _short(step: int | str) -> int | str:
    return step[:MAX_QUOTED_CHARACTERS] if isinstance(step, str) else step


def schema_grammar(schema: dict[str, Any], param: str) -> Grammar:
    """Raises InvalidRequest for one that is too long. Whether it is a schema, the backend says."""
    text = json.dumps(schema, ensure_ascii=False)
    check_grammar_size(text, param)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def check_grammar_size(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"{param}: expected at most {MAX_GRAMMAR_CHARACTERS} characters, got {len(text)}; "
            "send a smaller one",
            param=param,
        )


def check_stop_size(stops: list[str], param: str) -> None:
    num_characters = sum(map(len, stops))
    if num_characters > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"{param}: expected at most {MAX_STOP_CHARACTERS} characters in all, "
            f"got {num_characters}; send fewer or shorter ones",
            param=param,
        )

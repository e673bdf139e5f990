"""What the two dialects have in common: how a body is checked, how a stream is written."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from router.errors import InvalidRequest, RouterError
from router.events import TextEvent
from router.sse.codec import ServerSentEvent

# A stop string costs memory for each of its characters, on every request that carries it.
MAX_STOP_CHARACTERS = 16_384
# The engine wants top_p above 0; this small, it keeps the most likely token alone, as 0 means.
MIN_TOP_P = 1e-6

Path = tuple[int | str, ...]
Model = TypeVar("Model", bound=BaseModel)


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


def read_body(
    model: type[Model], body: bytes, refuse: Callable[[ErrorDetails, Path], InvalidRequest]
) -> Model:
    """Raises InvalidRequest for what is not a JSON object, and what `refuse` makes of the first
    field that is wrong. A path holds field names and list positions."""
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        problem = exc.errors(include_url=False, include_input=False)[0]
    if problem["type"] == "json_invalid":
        raise InvalidRequest(f"The request body is not valid JSON: {problem['ctx']['error']}")
    if problem["loc"] == ():
        raise InvalidRequest("The request body must be a JSON object")
    raise refuse(problem, tuple(step for step in problem["loc"] if step not in CONTENT_FORMS))


STRING_FORM = "<string>"
LIST_FORM = "<list>"
# Tags that tell the two forms of a message's content apart. They appear in pydantic's paths, never
# in a client's.
CONTENT_FORMS = frozenset({STRING_FORM, LIST_FORM})


def content_form(content: object) -> str:
    return STRING_FORM if isinstance(content, str) else LIST_FORM


def check_stop_size(stops: list[str], param: str) -> None:
    num_characters = sum(map(len, stops))
    if num_characters > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"{param}: expected at most {MAX_STOP_CHARACTERS} characters in all, "
            f"got {num_characters}; send fewer or shorter ones",
            param=param,
        )

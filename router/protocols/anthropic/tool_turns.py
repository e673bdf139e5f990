"""The order of tools in a Claude conversation: each tool_use is answered by one tool_result in the
user turn right after it. Neighbouring messages of one role are one turn, system messages are none.
"""

from collections.abc import Callable, Sequence

from router.errors import InvalidRequest
from router.protocols.anthropic.schema import Message, ToolResultBlock, ToolUseBlock

Invalid = Callable[[str, str], InvalidRequest]


def check_tool_turns(messages: Sequence[Message], invalid: Invalid) -> None:
    """Raises what `invalid` makes of a path and a message."""
    turns = _ToolTurns(invalid)
    for index, message in enumerate(messages):
        if message.role == "system":
            continue
        turns.enter(message.role)
        for number, block in enumerate(message.content):
            if isinstance(block, ToolUseBlock):
                turns.ask(block.id, f"messages.{index}.content.{number}")
            elif isinstance(block, ToolResultBlock):
                turns.answer(block.tool_use_id, f"messages.{index}.content.{number}")
    turns.end()


class _ToolTurns:
    def __init__(self, invalid: Invalid) -> None:
        self._invalid = invalid
        self._role = ""
        self._used: set[str] = set()
        self._unanswered: dict[str, str] = {}  # the id of a tool_use, and where it stands

    def enter(self, role: str) -> None:
        if role == "assistant" and self._role == "user":
            self.end()
        self._role = role

    def ask(self, tool_use_id: str, path: str) -> None:
        if self._role != "assistant":
            raise self._invalid(path, '"tool_use" blocks are only permitted in assistant messages')
        if tool_use_id in self._used:
            raise self._invalid(f"{path}.id", "tool_use ids must be unique")
        self._used.add(tool_use_id)
        self._unanswered[tool_use_id] = path

    def answer(self, tool_use_id: str, path: str) -> None:
        if self._role != "user":
            raise self._invalid(path, '"tool_result" blocks are only permitted in user messages')
        if self._unanswered.pop(tool_use_id, None) is None:
            raise self._invalid(
                f"{path}.tool_use_id",
                f"expected the id of an unanswered tool_use in the turn before, got {tool_use_id}",
            )

    def end(self) -> None:
        for tool_use_id, path in self._unanswered.items():
            raise self._invalid(
                path, f"expected a tool_result for {tool_use_id} in the turn after it"
            )

"""Stop strings found in text as it arrives.

An Aho-Corasick automaton: one step per character, however many stop strings there are. The text
held back is exactly the longest end of the text that begins some stop string.
"""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """Scans one completion. The first stop string to end wins, as when the text is watched
    character by character; of several that end together, the longest, so that nothing of a stop
    string is shown.

    `stops` must not contain the empty string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]
        self._depth: list[int] = [0]
        self._ending: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended it. After a match there is
        nothing more to show."""
        if self._matched is not None:
            return "", self._matched
        if not self._children[0]:
            return text, None
        held = self._held
        for position, character in enumerate(text, start=1):
            self._state = self._step(self._state, character)
            self._matched = self._ending[self._state]
            if self._matched is not None:
                self._held = ""
                seen = held + text[:position]
                return seen[: len(seen) - len(self._matched)], self._matched
        seen = held + text
        num_shown = len(seen) - self._depth[self._state]
        self._held = seen[num_shown:]
        return seen[:num_shown], None

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        if not stop:
            raise ValueError("expected stop strings of at least one character, got ''")
        node = 0
        for character in stop:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[node] + 1)
                self._ending.append(None)
            node = child
        self._ending[node] = stop

    def _link(self) -> None:
        """Breadth first: a node's fallback is shorter than the node, hence linked before it."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                self._fallback[child] = self._step(self._fallback[node], character)
                if self._ending[child] is None:
                    self._ending[child] = self._ending[self._fallback[child]]
                queue.append(child)

    def _step(self, state: int, character: str) -> int:
        while character not in self._children[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._children[state][character]

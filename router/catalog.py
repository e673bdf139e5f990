"""The models this entry serves, by name and by alias."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from router.capabilities import Capability
from router.errors import ModelNotFound
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`chat_template` None: the checkpoint has none, so it cannot chat."""

    id: str
    display_name: str
    created_at: datetime
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    capabilities: frozenset[Capability] = frozenset()


class Catalog:
    """Aliases resolve to a model and are listed beside it."""

    def __init__(self, models: Sequence[ServedModel], aliases: Mapping[str, str]) -> None:
        self.models = {model.id: model for model in models}
        unknown = sorted(target for target in aliases.values() if target not in self.models)
        if unknown:
            raise ValueError(f"aliases point to models that are not served: {', '.join(unknown)}")
        aliased = {alias: self.models[target] for alias, target in aliases.items()}
        self._names = aliased | self.models

    @property
    def names(self) -> tuple[str, ...]:
        """Models first, then aliases, each in order."""
        return (*self.models, *sorted(self._names.keys() - self.models.keys()))

    def resolve(self, name: str) -> ServedModel:
        """Raises ModelNotFound, naming what there is."""
        model = self._names.get(name)
        if model is None:
            known = ", ".join(self.names)
            raise ModelNotFound(f"model: {name!r} is not served here; use one of: {known}")
        return model

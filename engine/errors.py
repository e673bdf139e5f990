"""Everything the engine raises on purpose.

EngineError
├── InvalidSequence          the caller asked for something that can never run
│   ├── InvalidSamplingParams
│   │   └── InvalidGrammar   cannot be compiled; says what is wrong with it
│   ├── PromptTooLong        prompt + completion do not fit the context
│   └── DuplicateSequence    the id is already in the engine
├── UnsupportedModel         a checkpoint this engine cannot run; says what to do
├── CheckpointError          a weight is missing, misshapen or not finite; names file and tensor
├── CacheTooSmall            the KV pool cannot hold one sequence of the context length
├── ArenaExhausted           a KV arena has no room for a step now; another must give way, or end
├── RankLost                 another rank of the group is dead or silent; the group must end
├── EngineStopped            the step loop ended; carries the reason
└── IntegrityError           our own bookkeeping contradicts itself (a bug, never a user's fault)
"""


class EngineError(Exception):
    """Root of the tree."""


class InvalidSequence(EngineError):
    """The caller asked for something that can never run."""


class InvalidSamplingParams(InvalidSequence):
    """A sampling parameter is outside its range."""


class InvalidGrammar(InvalidSamplingParams):
    """A grammar that cannot be compiled, or not at a bearable cost."""


class PromptTooLong(InvalidSequence):
    """Prompt plus completion do not fit the context."""


class DuplicateSequence(InvalidSequence):
    """A sequence with this id is already in the engine."""


class UnsupportedModel(EngineError):
    """The checkpoint needs something this engine does not have."""


class CheckpointError(EngineError):
    """A weight file is damaged: the message names file and tensor."""


class CacheTooSmall(EngineError):
    """The KV pool cannot hold one sequence of the context length."""


class ArenaExhausted(EngineError):
    """A KV arena has fewer slabs free or evictable than a step needs; nothing was taken."""


class RankLost(EngineError):
    """Another rank of this engine is dead or silent, and none can go on without it."""


class EngineStopped(EngineError):
    """The step loop has ended and takes no more work."""


class IntegrityError(EngineError):
    """The cache or scheduler bookkeeping contradicts itself."""

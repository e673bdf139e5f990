"""What the engine itself does about grammars; of the real compiler see the deployments' tests."""

from dataclasses import replace

import pytest
import torch

from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.errors import InvalidGrammar, InvalidSamplingParams
from engine.execution.grammar_masks import grammar_masks
from engine.execution.sampler import Sampler
from engine.execution.sampling_rows import SamplingRows, row_of
from engine.grammar import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind, num_mask_words
from engine.sampling_params import SamplingParams
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence
from tests.fakes.executor import FakeExecutor
from tests.fakes.grammar import STOP, FakeGrammars

VOCAB_SIZE = 97
BLOCK_SIZE = 4


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def following(text: str, max_tokens: int = 20, **settings) -> SamplingParams:
    return SamplingParams(
        max_tokens, stop_token_ids=frozenset({STOP}), grammar=regex(text), **settings
    )


class SamplingExecutor(FakeExecutor):
    """As the fake, but its tokens are drawn: from logits that depend on the history alone."""

    def execute(self, batch):
        likely = super().execute(batch).token_ids
        logits = torch.stack(
            [
                torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(token_id))
                for token_id in likely
            ]
        )
        sampled = Sampler().sample(logits, [entry.sequence for entry in batch.sampling])
        for entry, token_id in zip(batch.sampling, sampled.token_ids, strict=True):
            self._sampled[entry.sequence] = entry.end, token_id
        return sampled


@pytest.fixture(params=[False, True], ids=["in step", "a step ahead"])
def engine_with(request):
    """Builds an engine, which waits for the tokens of a step or does not."""

    def build(grammars, *, num_blocks=64):
        scheduler = Scheduler(
            SchedulerConfig(8, 16),
            PagedSpace(BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache=True), b"model"),
            28,
        )
        executor = SamplingExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        return Engine(
            scheduler,
            executor,
            vocab_size=VOCAB_SIZE,
            launch=executor.launch if request.param else None,
            grammars=grammars,
            check_integrity=True,
        )

    return build


def completions(engine):
    tokens: dict[str, list[int]] = {}
    reasons = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.seq_id, []).extend(output.token_ids)
            reasons[output.seq_id] = output.finish_reason
    return tokens, reasons


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_completion_follows_its_grammar_and_stops(engine_with, temperature, seed):
    engine = engine_with(FakeGrammars())
    engine.add("a", range(5), following("5 96,64,31 32", temperature=temperature, seed=seed))
    engine.add("free", range(6), SamplingParams(4, temperature=temperature, seed=seed))
    tokens, reasons = completions(engine)
    first, second, third, last = tokens["a"]
    assert first in (5, 96)
    assert second == 64
    assert third in (31, 32)
    assert last == STOP
    assert reasons == {"a": FinishReason.STOP_TOKEN, "free": FinishReason.LENGTH}


def test_the_limit_cuts_a_grammar_short(engine_with):
    engine = engine_with(FakeGrammars())
    engine.add("a", range(5), following("7,8,9", max_tokens=2))
    assert completions(engine) == ({"a": [7, 8]}, {"a": FinishReason.LENGTH})


def test_a_grammar_that_fails_in_the_middle_ends_as_cut_short(engine_with):
    engine = engine_with(FakeGrammars(fail_at=2))
    engine.add("a", range(5), following("7,8,9"))
    assert completions(engine) == ({"a": [7, 8, STOP]}, {"a": FinishReason.LENGTH})


def test_preempted_sequences_go_on_where_they_were(engine_with):
    text = ",".join(str(10 + position) for position in range(18))
    grammars = FakeGrammars()
    engine = engine_with(grammars, num_blocks=8)
    num_preemptions = 0
    for name in ("a", "b", "c"):
        engine.add(name, range(3), following(text), cache_salt=name.encode())
    tokens = {name: [] for name in ("a", "b", "c")}
    while engine.has_work:
        output = engine.step()
        num_preemptions += output.stats.num_preempted
        for each in output.outputs:
            tokens[each.seq_id] += each.token_ids
    assert num_preemptions > 0
    assert all(ids == [*range(10, 28), STOP] for ids in tokens.values())
    assert [state.accepted for state in grammars.states] == list(tokens.values())


def test_a_malformed_grammar_is_refused_and_nothing_stays(engine_with):
    engine = engine_with(FakeGrammars())
    engine.add("good", range(5), following("7"))
    with pytest.raises(InvalidGrammar, match="expected token ids, got 'x'"):
        engine.add("bad", range(5), following("x"))
    assert completions(engine) == ({"good": [7, STOP]}, {"good": FinishReason.STOP_TOKEN})


def test_an_engine_without_a_compiler_says_so(engine_with):
    engine = engine_with(None)
    with pytest.raises(InvalidGrammar, match=r"without a compiler of grammars, got a regex; drop"):
        engine.add("a", range(5), following("7"))


def test_params_with_a_grammar_need_a_stop_token():
    with pytest.raises(InvalidSamplingParams, match="stop_token_ids must be not empty"):
        SamplingParams(5, grammar=regex("7"))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "", "a regex has a text, got ''"),
        (GrammarKind.JSON_OBJECT, "{}", "a json_object has no text, got '{}'"),
        (
            GrammarKind.JSON_SCHEMA,
            " " * (MAX_GRAMMAR_CHARACTERS + 1),
            "65536 characters, got 65537",
        ),
    ],
)
def test_a_grammar_has_the_text_of_its_kind(kind, text, message):
    with pytest.raises(InvalidGrammar, match=message):
        Grammar(kind, text)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97])
def test_the_mask_ends_with_the_vocabulary(vocab_size):
    """Bits past its end are not looked at, and the last token is reached."""
    last = vocab_size - 1
    params = replace(following(str(last)), temperature=0.0)
    sequence = Sequence("a", [0], 1, params)
    sequence.grammar_state = FakeGrammars().compile(regex(f"{last} {last}"))
    sampled = Sampler().sample(torch.zeros(1, vocab_size), [sequence])
    assert sampled.token_ids == (last,)
    assert num_mask_words(vocab_size) * 32 >= vocab_size


def test_bias_and_penalties_cannot_bring_back_what_is_forbidden():
    logits = torch.tensor([[9.0, 3.0, -1.0, 2.0]])
    params = following(
        "2 3", temperature=1.0, logit_bias=((0, 100.0), (3, -100.0)), repetition_penalty=3.0
    )
    for seed in range(50):
        sequence = Sequence("a", [0, 1], 1, replace(params, seed=seed))
        sequence.grammar_state = FakeGrammars().compile(regex("2 3"))
        assert Sampler().sample(logits, [sequence]).token_ids == (2,)
    assert logits.tolist() == [[9.0, 3.0, -1.0, 2.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_kernel_draws_under_the_same_masks(temperature):
    """What is drawn on a GPU, here by the kernel's reference; one row has no grammar."""
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    texts = ("5 96", None, "64", "31 32 33")
    sequences = []
    for seed, text in enumerate(texts):
        params = SamplingParams(9) if text is None else following(text)
        params = replace(params, temperature=temperature, seed=seed)
        sequences.append(Sequence(str(seed), [0], 1, params))
        if text is not None:
            sequences[-1].grammar_state = FakeGrammars().compile(regex(text))
    rows = SamplingRows.of([row_of(each.params) for each in sequences], logits.device)
    masks = grammar_masks(sequences, VOCAB_SIZE, logits.device)
    drawn = rows.sample(logits, torch.ones(4, dtype=torch.int64), masks)
    assert tuple(drawn.tolist()) == Sampler().sample(logits, sequences).token_ids
    for token_id, text in zip(drawn.tolist(), texts, strict=True):
        assert text is None or str(token_id) in text.split()
    assert grammar_masks(sequences[1:2], VOCAB_SIZE, logits.device) is None
    assert grammar_masks([], VOCAB_SIZE, logits.device) is None


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.tensor([[9.0, 3.0, -1.0, 2.0]])
    sequence = Sequence("a", [0], 1, following("2", num_logprobs=2))
    sequence.grammar_state = FakeGrammars().compile(regex("2"))
    (logprobs,) = Sampler().sample(logits, [sequence]).logprobs
    expected = logits.log_softmax(-1)[0]
    assert logprobs.logprob == expected[2].item()
    assert [token_id for token_id, _ in logprobs.top] == [0, 1]

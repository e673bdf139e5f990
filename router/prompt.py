"""A chat request becomes a generation request: text ends here, token ids begin."""

import secrets
from dataclasses import dataclass

from router.account import RequestAccount
from router.catalog import ServedModel
from router.chat import ChatRequest
from router.errors import InvalidRequest, UnsupportedFeature
from router.generation import GenerationRequest, SamplingSettings


def prompt_token_ids(chat: ChatRequest, model: ServedModel) -> tuple[int, ...]:
    """The rendered chat template as token ids. Raises InvalidRequest, UnsupportedFeature."""
    if model.chat_template is None:
        raise UnsupportedFeature(f"model {model.id} has no chat template: it cannot chat")
    return tuple(model.tokenizer.encode(model.chat_template.render(chat.messages)))


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How many tokens a completion may have. `is_context_bound` when the context, not the caller,
    set the limit: the caller is then told that the window ran out."""

    max_tokens: int
    is_context_bound: bool


def token_budget(max_tokens: int | None, num_prompt_tokens: int, model: ServedModel) -> TokenBudget:
    """Raises InvalidRequest with the numbers when the prompt, or `max_tokens`, cannot fit."""
    context = model.max_model_len
    if max_tokens is not None and max_tokens > context:
        raise InvalidRequest(
            f"max_tokens: {max_tokens} > {context}, the context length of {model.id}",
            param="max_tokens",
        )
    room = context - num_prompt_tokens
    if room < 0 or (room == 0 and max_tokens != 0):
        raise InvalidRequest(
            f"prompt is too long: {num_prompt_tokens} tokens leave no room in the context of "
            f"{context} tokens of {model.id}; shorten the conversation",
            param="messages",
        )
    if max_tokens is None or max_tokens > room:
        return TokenBudget(room, is_context_bound=True)
    return TokenBudget(max_tokens, is_context_bound=False)


def generation_requests(
    chat: ChatRequest,
    model: ServedModel,
    prompt: tuple[int, ...],
    budget: TokenBudget,
    account: RequestAccount,
) -> list[GenerationRequest]:
    """One request per completion wanted, with distinct ids and seeds."""
    assert account.principal is not None, "a request without a caller reached the prompt"
    request_id, principal = account.request_id, account.principal
    first_seed = secrets.randbits(62) if chat.seed is None else chat.seed
    return [
        GenerationRequest(
            request_id=request_id if choice == 0 else f"{request_id}-{choice}",
            model=model.id,
            prompt_token_ids=prompt,
            sampling=_sampling(chat, model, budget, seed=(first_seed + choice) % (1 << 63)),
            tenant=principal.team,
            key_id=principal.key_id,
            cache_salt=principal.team,
        )
        for choice in range(chat.num_completions)
    ]


def _sampling(
    chat: ChatRequest, model: ServedModel, budget: TokenBudget, seed: int
) -> SamplingSettings:
    for token_id, _ in chat.logit_bias:
        if token_id >= model.vocab_size:
            raise InvalidRequest(
                f"logit_bias: token id {token_id} is outside the vocabulary of "
                f"{model.vocab_size} tokens",
                param="logit_bias",
            )
    return SamplingSettings(
        max_tokens=budget.max_tokens,
        temperature=chat.temperature,
        top_k=chat.top_k,
        top_p=chat.top_p,
        min_p=chat.min_p,
        repetition_penalty=chat.repetition_penalty,
        presence_penalty=chat.presence_penalty,
        frequency_penalty=chat.frequency_penalty,
        seed=seed,
        stop_token_ids=() if chat.ignore_eos else model.eos_token_ids,
        logit_bias=chat.logit_bias,
        num_logprobs=chat.num_logprobs,
        grammar=chat.grammar,
    )

"""`flashray trace --attention`: what each layer looks at while a model answers."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from deployments.attention_plot import plot_layers, plot_steps
from deployments.errors import ConfigError, DeploymentError
from deployments.model_files import ModelFiles, prepare_model
from deployments.progress_bar import ProgressBar, say
from deployments.text_file import begin_of_prompts, read_text
from deployments.trace_file import trace_json
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig
from engine.errors import EngineError, UnsupportedModel
from engine.execution.attention_trace import NUM_FIRST, NUM_LAST, AttentionTrace, Masses
from engine.models.model_config import ModelConfig
from engine.trace import num_steps, trace_attention
from router.errors import RouterError
from router.text.tokenizer import Tokenizer

NO_TIERS = "none"
LEAST_TOKENS = 2
COLUMNS = "{:<18}{:>8}{:>14}{:>11}{:>17}{:>17}"


def trace(
    model: str,
    text: Path,
    tiers: str,
    skip_epsilon: float,
    num_tokens: int,
    layer: int | None,
    out: Path | None,
    device: str,
) -> int:
    """`text` is the prompt, of which `num_tokens` tokens follow. Writes trace.json, layers.png and
    layer-N.png into `out`, N being `layer`, or the one that looks farthest back. Raises
    DeploymentError."""
    _refuse_options(num_tokens, device)
    cache = CacheConfig(tiers=_tiers(tiers, skip_epsilon))
    content = read_text(text)
    files = prepare_model(model, progress=say)
    out = out or Path(f"{files.manifest.name}.trace")
    try:
        tokenizer = Tokenizer.from_folder(files.path)
        prompt_ids = _prompt_ids(files, tokenizer, text, content, num_tokens)
        _refuse_layer(layer, ModelConfig.from_folder(files.path).num_layers)
        _make_folder(out)
        config = _config(files, cache, device)
        total = num_steps(len(prompt_ids), num_tokens, config)
        progress = ProgressBar("tracing", "steps", total, sys.stderr)
        found = trace_attention(config, prompt_ids, num_tokens, progress.advance)
    except (EngineError, RouterError) as exc:
        can_do_without = isinstance(exc, UnsupportedModel) and tiers != NO_TIERS
        hint = f": --tiers {NO_TIERS}" if can_do_without else ""
        raise DeploymentError(f"{exc}{hint}") from exc
    heading = {
        "model": files.manifest.name,
        "weights_sha256": files.manifest.sha256,
        "text_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "tiers": tiers,
        "skip_epsilon": skip_epsilon,
    }
    written = _write(found, heading, farthest_layer(found) if layer is None else layer, out)
    print(f"{_title(heading)}: {len(prompt_ids):,} tokens of {text} and {num_tokens} more")
    print(f"answer  {tokenizer.decode(found.token_ids)!r}")
    _print_masses(found)
    _print_demotions(found)
    _print_certificates(found)
    for file in written:
        print(f"{file.name:<14}{file}")
    return 0


def _refuse_options(num_tokens: int, device: str) -> None:
    if num_tokens < LEAST_TOKENS:
        raise ConfigError(
            f"--max-tokens must be at least {LEAST_TOKENS}, for one to be decoded, got {num_tokens}"
        )
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: torch sees none here; leave it out")


def _make_folder(out: Path) -> None:
    """Before minutes are spent."""
    try:
        out.mkdir(exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"--out {out}: expected a folder, or a place for one: {exc.strerror}"
        ) from exc


def _prompt_ids(
    files: ModelFiles, tokenizer: Tokenizer, text: Path, content: str, num_tokens: int
) -> list[int]:
    """Behind the token that prompts of the model begin with. Raises ConfigError."""
    if not content:
        raise ConfigError(f"{text} is empty; say something")
    prompt_ids = begin_of_prompts(tokenizer) + tokenizer.encode(content)
    context = files.manifest.max_model_len
    if len(prompt_ids) + num_tokens > context:
        raise ConfigError(
            f"{text} has {len(prompt_ids):,} tokens of {files.manifest.name}, which with "
            f"{num_tokens:,} of --max-tokens are more than its context of {context:,}; "
            "take a shorter text"
        )
    return prompt_ids


def _refuse_layer(layer: int | None, num_layers: int) -> None:
    if layer is not None and not 0 <= layer < num_layers:
        raise ConfigError(f"--layer must be in [0, {num_layers}), got {layer}")


def _tiers(tiers: str, skip_epsilon: float) -> TierConfig | None:
    """Raises ConfigError."""
    if tiers == NO_TIERS:
        if skip_epsilon:
            raise ConfigError(
                f"--skip-epsilon needs tiers, --tiers is {NO_TIERS}: leave out either"
            )
        return None
    try:
        return TierConfig(cold_format=tiers, skip_epsilon=skip_epsilon)
    except ValueError as exc:
        raise ConfigError(f"--skip-epsilon: {exc}") from exc


def _config(files: ModelFiles, cache: CacheConfig, device: str) -> EngineConfig:
    return EngineConfig(
        files.path,
        device=device,
        dtype="auto" if device == "cpu" else "bfloat16",
        num_threads=torch.get_num_threads(),
        cache=cache,
    )


def farthest_layer(found: AttentionTrace) -> int:
    """Whose decodes leave least to the first tokens and to the last."""
    near = [step.first_masses.mean(1) + step.last_masses.mean(1) for step in found.decodes]
    return int(np.mean(near, 0).argmin())


def _print_masses(found: AttentionTrace) -> None:
    """Tokens and bytes of the last step, in all layers; masses of all decodes."""
    last = found.decodes[-1]
    num_bytes = found.num_bytes(last)
    by_tier = np.mean([found.by_tier(step) for step in found.decodes], 0)
    print(
        COLUMNS.format(
            "", "tokens", "bytes a step", "mean mass", "least, in layer", "most, in layer"
        )
    )
    for nth, run in enumerate(last.runs[0]):
        tokens, size = f"{run.end - run.start:,}", f"{num_bytes[run.tier]:,}"
        _print_row(run.tier, tokens, size, by_tier[:, nth])
    for name, number, masses in (
        ("first", NUM_FIRST, [step.first_masses for step in found.decodes]),
        ("last", NUM_LAST, [step.last_masses for step in found.decodes]),
    ):
        _print_row(f"the {name} {number}", str(number), "", np.mean(masses, (0, 2)))


def _print_row(name: str, num_tokens: str, num_bytes: str, masses: Masses) -> None:
    least, most = (
        f"{masses[layer]:.1%} in {layer:>2}" for layer in (masses.argmin(), masses.argmax())
    )
    print(COLUMNS.format(name, num_tokens, num_bytes, f"{masses.mean():.1%}", least, most))


def _print_demotions(found: AttentionTrace) -> None:
    for name, steps in (("prompt", found.steps[:1]), ("decodes", found.decodes)):
        made: dict[str, int] = {}
        for step in steps:
            for each in step.demoted[0]:
                kind = f"{each.part.name} {each.source_format.name} to {each.target_format.name}"
                made[kind.lower()] = made.get(kind.lower(), 0) + each.num_blocks
        if made:
            kinds = ", ".join(f"{number} of {kind}" for kind, number in made.items())
            print(f"demoted in each layer by {name}, blocks: {kinds}")


def _print_certificates(found: AttentionTrace) -> None:
    """Means over decodes, layers and heads."""
    certified = [step.certificates for step in found.decodes if step.certificates is not None]
    if certified:
        shares = np.stack([each.shares for each in certified])
        left_out = np.mean([each.left_out for each in certified])
        print(
            f"left out by decodes: {left_out:.1f} blocks' values a KV head, of the softmax at most "
            f"{shares.mean():.2%}, a mean, and {shares.max():.2%}, the most"
        )


def _title(heading: Mapping[str, object]) -> str:
    tiers = heading["tiers"]
    return f"{heading['model']}, {'exact' if tiers == NO_TIERS else tiers}"


def _write(
    found: AttentionTrace, heading: Mapping[str, object], layer: int, out: Path
) -> tuple[Path, ...]:
    title = _title(heading)
    written = {
        out / "trace.json": trace_json(found, heading).encode(),
        out / "layers.png": plot_layers(found, title).png(),
        out / f"layer-{layer}.png": plot_steps(found, layer, title).png(),
    }
    try:
        for file, content in written.items():
            file.write_bytes(content)
    except OSError as exc:
        raise DeploymentError(f"{exc.filename}: cannot be written: {exc.strerror}") from exc
    return tuple(written)

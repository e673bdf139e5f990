"""`flashray calibrate`: what each layer loses by each cold format on a text, and what it keeps."""

import hashlib
import math
import sys
from pathlib import Path

from deployments.calibration_plot import plot
from deployments.errors import ConfigError, DeploymentError
from deployments.model_files import ModelFiles, prepare_model
from deployments.progress_bar import ProgressBar, say
from deployments.text_file import begin_of_prompts, read_text
from engine.build import weights_sha256
from engine.cache.calibration import BY_BITS, Calibration, choose_formats
from engine.cache.tier_config import TierConfig
from engine.errors import EngineError
from engine.models.calibrate import measure_errors, min_tokens
from engine.models.decoder import Decoder, build_decoder
from engine.models.model_config import ModelConfig
from engine.models.weights import load_weights, resolve_dtype
from router.errors import RouterError
from router.text.tokenizer import Tokenizer

COLUMNS = "{:<8}{:>12}{:>14}{:>10}{:>16}"


def calibrate(
    model: str,
    text: Path,
    out: Path | None,
    plot_file: Path | None,
    cold_format: str,
    num_tokens: int,
    max_error: float,
) -> int:
    """Writes the calibration and, where `plot_file` names one, its picture. `num_tokens` of a
    window at most. Raises DeploymentError."""
    tiers = TierConfig(cold_format=cold_format)
    _refuse_options(plot_file, num_tokens, max_error, min_tokens(tiers))
    content = read_text(text)
    files = prepare_model(model, progress=say)
    out = out or Path(f"{files.manifest.name}.calibration.json")
    _refuse_folders(out, plot_file)
    try:
        windows = windows_of(files, text, content, num_tokens, min_tokens(tiers))
        decoder = _decoder(files)
        progress = ProgressBar(
            "measuring", "layers", len(windows) * decoder.config.num_layers, sys.stderr
        )
        errors = measure_errors(decoder, windows, tiers, progress.advance)
        calibration = Calibration(
            model=files.manifest.name,
            weights_sha=weights_sha256(files.path),
            text_sha=hashlib.sha256(content.encode()).hexdigest(),
            num_tokens=tuple(map(len, windows)),
            tiers=tiers,
            max_error=max_error,
            errors=errors,
            cold_formats=choose_formats(errors, cold_format, max_error),
        )
    except (EngineError, RouterError) as exc:
        raise DeploymentError(str(exc)) from exc
    _write(calibration, out, plot_file)
    _print_table(calibration)
    print(f"calibration  {out}")
    if plot_file is not None:
        print(f"plot         {plot_file}")
    return 0


def _refuse_options(
    plot_file: Path | None, num_tokens: int, max_error: float, least_tokens: int
) -> None:
    if not (math.isfinite(max_error) and max_error > 0):
        raise ConfigError(f"--max-error must be above 0, such as 0.03 for 3 %, got {max_error}")
    if num_tokens < least_tokens:
        raise ConfigError(
            f"--tokens must be at least {least_tokens:,}, for tokens to see cold blocks, "
            f"got {num_tokens:,}"
        )
    if plot_file is not None and plot_file.suffix != ".svg":
        raise ConfigError(f"--plot draws SVG: name a file that ends in .svg, got {plot_file}")


def _refuse_folders(*paths: Path | None) -> None:
    """Before minutes are spent."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.absolute().parent}; make it first")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file")


def windows_of(
    files: ModelFiles, text: Path, content: str, num_tokens: int, least_tokens: int
) -> list[list[int]]:
    """Token ids of the start of the text and of its end, up to `num_tokens` each or what the
    context has, each behind the token that prompts of the model begin with. Raises ConfigError."""
    manifest = files.manifest
    if manifest.max_model_len < least_tokens:
        raise ConfigError(
            f"{manifest.name} has a context of {manifest.max_model_len:,} tokens, "
            f"a calibration needs {least_tokens:,}: nothing of so short a context is ever cold"
        )
    tokenizer = Tokenizer.from_folder(files.path)
    token_ids = tokenizer.encode(content)
    begins = begin_of_prompts(tokenizer)
    size = min(num_tokens, manifest.max_model_len) - len(begins)
    parts = (token_ids[:size], token_ids[size:][-size:])
    windows = [begins + part for part in parts if len(begins) + len(part) >= least_tokens]
    if not windows:
        raise ConfigError(
            f"{text} has {len(token_ids):,} tokens of {manifest.name}, a calibration needs at "
            f"least {least_tokens - len(begins):,}, for tokens to see cold blocks, and is better "
            f"with {2 * size:,}; name a longer text"
        )
    return windows


def _decoder(files: ModelFiles) -> Decoder:
    config = ModelConfig.from_folder(files.path)
    dtype = resolve_dtype("auto", config.dtype, "cpu")
    return build_decoder(config, load_weights(files.path, config, dtype))


def _print_table(found: Calibration) -> None:
    windows = ", ".join(map(str, found.num_tokens))
    print(f"{found.model}: {sum(found.num_tokens):,} tokens in windows of {windows}")
    print(COLUMNS.format("format", "mean error", "worst error", "in layer", "kept by layers"))
    for name in BY_BITS:
        errors = found.errors[name]
        worst = max(errors)
        print(
            COLUMNS.format(
                name,
                f"{sum(errors) / len(errors):.2%}",
                f"{worst:.2%}",
                errors.index(worst),
                found.cold_formats.count(name),
            )
        )
    for layers, name in found.groups:
        if name != found.tiers.cold_format:
            print(f"{name} instead of {found.tiers.cold_format}: layers", *layers)


def _write(calibration: Calibration, out: Path, plot_file: Path | None) -> None:
    try:
        calibration.write(out)
        if plot_file is not None:
            plot_file.write_text(plot(calibration), encoding="utf-8")
    except OSError as exc:
        raise DeploymentError(f"{exc.filename}: cannot be written: {exc.strerror}") from exc

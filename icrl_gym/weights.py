"""Weights on disk: safetensors for the numbers, JSON for the configuration, and no code in either."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from icrl_gym.kernels import make_kernel

if TYPE_CHECKING:
    from icrl_gym.adaptive import AdaptiveTransformer
    from icrl_gym.learned import LearnedTransformer
    from icrl_gym.transformer import InContextTransformer

__all__ = ["load", "load_learned", "save", "save_learned", "shipped", "shipped_card"]

_Built = TypeVar("_Built")

_FORMAT, _ADAPTIVE_FORMAT, _LEARNED_FORMAT = (
    f"icrl_gym.{name}" for name in ("InContextTransformer", "AdaptiveTransformer", "LearnedTransformer")
)
_CONFIG, _WEIGHTS = "config.json", "weights.safetensors"


def save(transformer: InContextTransformer | AdaptiveTransformer, folder: str | os.PathLike[str]) -> None:
    """Write ``config.json`` and ``weights.safetensors`` into a folder, whole files or none.

    A save into a folder that holds a transformer replaces it.

    Raises:
        ImportError: safetensors is not installed.
    """
    from icrl_gym.transformer import InContextTransformer

    if isinstance(transformer, InContextTransformer):
        config = {"format": _FORMAT, "version": 1, **_configuration(transformer)}
    else:
        config = {"format": _ADAPTIVE_FORMAT, "version": 1, **_adaptive_configuration(transformer)}
    _write(Path(folder), config, dict(transformer.named_buffers()))


def save_learned(learned: LearnedTransformer, folder: str | os.PathLike[str]) -> None:
    """Write a transformer with learned matrices likewise.

    Raises:
        ImportError: safetensors is not installed.
    """
    config = {
        "format": _LEARNED_FORMAT,
        "version": 1,
        "construction": _configuration(learned.construction),
        "n_features": learned.n_features,
        "shared_layers": learned.shared_layers,
        "n_heads": learned.n_heads,
        "width": learned.width,
    }
    _write(Path(folder), config, learned.state_dict())


def load(folder_or_name: str | os.PathLike[str]) -> InContextTransformer | AdaptiveTransformer:
    """Read a transformer from a folder, or one that the package ships, by name.

    A folder comes first. The names of Meta-World's tasks may do without their ``-v3``.

    Raises:
        FileNotFoundError: Neither a folder with a transformer nor a shipped name.
        ValueError: A file that is truncated, of another format, or not safetensors. No code in it is run.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    path = Path(folder_or_name)
    if not (path / _CONFIG).is_file():
        known = shipped()
        name = next((n for n in (str(folder_or_name), f"{folder_or_name}-v3") if n in known), None)
        if name is None:
            raise FileNotFoundError(
                f"no transformer at {str(folder_or_name)!r}: expected a folder with {_CONFIG} and {_WEIGHTS}, "
                f"or a shipped name ({', '.join(known) or 'this version ships none'})."
            )
        path = _shipped_folder() / name
    builders: dict[str, Callable[[dict[str, Any]], InContextTransformer | AdaptiveTransformer]] = {
        _FORMAT: _transformer,
        _ADAPTIVE_FORMAT: _adaptive,
    }
    transformer = _build(path, builders)
    _fill(transformer, path, safetensors)
    _check_constants(transformer, path)
    return transformer


def load_learned(folder: str | os.PathLike[str]) -> LearnedTransformer:
    """Read a transformer with learned matrices from a folder.

    Raises:
        FileNotFoundError: No folder with a transformer.
        ValueError: A file that is truncated, of another format, or not safetensors. No code in it is run.
        ImportError: safetensors is not installed.
    """
    from icrl_gym.learned import LearnedTransformer

    safetensors = _safetensors()
    path = Path(folder)
    if not (path / _CONFIG).is_file():
        raise FileNotFoundError(
            f"no transformer at {str(folder)!r}: expected a folder with {_CONFIG} and {_WEIGHTS}, as `save_pretrained` "
            f"writes them."
        )

    def build(config: dict[str, Any]) -> LearnedTransformer:
        form = {name: config[name] for name in ("n_features", "shared_layers", "n_heads", "width")}
        # "random": the numbers come from the file, and every form has random ones.
        return LearnedTransformer(_transformer(config["construction"]), initialization="random", **form)

    learned = _build(path, {_LEARNED_FORMAT: build})
    _fill(learned, path, safetensors)
    _check_constants(learned.construction, path)
    if not all(bool(torch.isfinite(matrix).all()) for matrix in learned.parameters()):
        raise ValueError(f"{path / _WEIGHTS} holds numbers out of their range: expected finite matrices.")
    return learned


def _configuration(transformer: InContextTransformer) -> dict[str, Any]:
    return {
        "kernel": transformer.kernel.config(),
        "n_layers": "inf" if transformer.infinite else len(transformer.step_sizes),
        "step_normalization": transformer.step_normalization,
        "algorithm": transformer.algorithm.name,
        "trace_decay": transformer.algorithm.trace_decay,
        "acceleration": transformer.acceleration,
        "ridge": transformer.ridge,
        "value_shift": transformer.value_shift,
        "n_landmarks": transformer.n_landmarks,
        "offset": transformer.offset,
    }


def _adaptive_configuration(transformer: AdaptiveTransformer) -> dict[str, Any]:
    return {
        "metrics": list(transformer.metrics),
        "bandwidths": transformer.log_bandwidths.shape[-1],
        "ridges": len(transformer.log_ridges),
        "n_layers": "inf" if transformer.infinite else int(transformer.n_layers),
        "n_folds": transformer.n_folds,
        "contiguous_folds": transformer.contiguous_folds,
        "sharpness": transformer.sharpness,
        "value_shift": transformer.value_shift,
        "offset": transformer.offset,
    }


def _adaptive(config: dict[str, Any]) -> AdaptiveTransformer:
    from icrl_gym.adaptive import AdaptiveTransformer

    return AdaptiveTransformer(
        [1.0] * config["bandwidths"],
        [1.0] * config["ridges"],
        config["metrics"],
        n_layers=float("inf") if config["n_layers"] == "inf" else config["n_layers"],
        n_folds=config["n_folds"],
        contiguous_folds=config["contiguous_folds"],
        sharpness=config["sharpness"],
        value_shift=config["value_shift"],
        offset=config["offset"],
    )


def _transformer(config: dict[str, Any]) -> InContextTransformer:
    from icrl_gym.transformer import InContextTransformer

    infinite = config["n_layers"] == "inf"
    # Files of before there was another algorithm say none.
    name = config.get("algorithm", "td")
    return InContextTransformer(
        make_kernel(**config["kernel"]),
        step_normalization=config["step_normalization"],
        n_layers=float("inf") if infinite else config["n_layers"],
        algorithm=name,
        trace_decay=config["trace_decay"] if name == "td_lambda" else None,
        acceleration=config.get("acceleration", "none"),
        ridge=config["ridge"],
        value_shift=config["value_shift"],
        n_landmarks=config["n_landmarks"],
        offset=config["offset"],
    )


def _write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    safetensors = _safetensors()
    path.mkdir(parents=True, exist_ok=True)
    weights = safetensors.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    # The configuration goes first and comes last: a folder without it is not a transformer, so a killed save leaves
    # nothing that loads, neither half of this transformer nor new numbers under the configuration of an old one.
    (path / _CONFIG).unlink(missing_ok=True)
    _replace(path / _WEIGHTS, weights)
    _replace(path / _CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def _build(path: Path, builders: dict[str, Callable[[dict[str, Any]], _Built]]) -> _Built:
    """What the configuration in a folder describes, with whatever numbers."""
    try:
        config = json.loads((path / _CONFIG).read_text())
        named = config.get("format") if isinstance(config, dict) else None
        if named not in builders and named in (_FORMAT, _ADAPTIVE_FORMAT, _LEARNED_FORMAT):
            name = named.removeprefix("icrl_gym.")
            raise ValueError(f"it is that of another kind; load it with {name}.from_pretrained")
        if not isinstance(config, dict) or config.get("format") not in builders or config.get("version") != 1:
            raise ValueError(f"it does not say format {' or '.join(map(repr, builders))}, version 1")
        return builders[config["format"]](config)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{path / _CONFIG} is not the configuration of a transformer: {reason}.") from error


def _fill(module: nn.Module, path: Path, safetensors: Any) -> None:
    """Put the numbers in a folder into a module."""
    try:
        tensors = safetensors.load((path / _WEIGHTS).read_bytes())
    except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path / _WEIGHTS} is not a whole safetensors file ({error}). Pickled weights are not read; save them with "
            f"`save_pretrained`."
        ) from error
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path / _WEIGHTS} does not fit {_CONFIG} beside it: {error}.") from error


def _check_constants(transformer: InContextTransformer | AdaptiveTransformer, path: Path) -> None:
    kernel = getattr(transformer, "kernel", None)
    numbers = "step sizes" if kernel is not None else "bandwidths and ridges"
    gamma, constants = transformer.gamma, list(kernel.buffers()) if kernel is not None else []
    in_range = bool(0 <= gamma <= 1) and all(bool((constant > 0).all()) for constant in constants)
    if not in_range or not all(bool(torch.isfinite(number).all()) for number in transformer.buffers()):
        raise ValueError(
            f"{path / _WEIGHTS} holds numbers out of their range: expected finite {numbers}, gamma in [0, 1] and positive "
            f"constants of the kernel."
        )


def shipped() -> tuple[str, ...]:
    """The names of the transformers that the package ships."""
    folder = _shipped_folder()
    return tuple(sorted(p.name for p in folder.iterdir() if (p / _CONFIG).is_file())) if folder.is_dir() else ()


def shipped_card(name: str) -> dict[str, Any]:
    """What ``icrl-gym pretrain`` wrote beside a shipped transformer: data, seed, command, and what it is good for.

    Args:
        name: One of :func:`shipped`, with or without its ``-v3``.

    Raises:
        ValueError: Another name.
    """
    known = shipped()
    found = next((n for n in (name, f"{name}-v3") if n in known), None)
    if found is None:
        raise ValueError(f"no shipped transformer is named {name!r}; expected one of {', '.join(known)}.")
    return json.loads((_shipped_folder() / found / "card.json").read_text())


def _shipped_folder() -> Path:
    return Path(str(resources.files("icrl_gym"))) / "pretrained"


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError('weights are safetensors files: pip install "icrl-gym[weights]".') from error

    class _Module:
        SafetensorError = safetensors.SafetensorError
        save = staticmethod(safetensors.torch.save)
        load = staticmethod(safetensors.torch.load)

    return _Module

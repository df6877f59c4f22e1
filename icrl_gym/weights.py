"""Weights on disk: safetensors for the numbers, JSON for the configuration, and no code in either."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icrl_gym.kernels import make_kernel

if TYPE_CHECKING:
    from icrl_gym.transformer import InContextTransformer

__all__ = ["load", "save", "shipped"]

_FORMAT = "icrl_gym.InContextTransformer"
_CONFIG, _WEIGHTS = "config.json", "weights.safetensors"


def save(transformer: InContextTransformer, folder: str | os.PathLike[str]) -> None:
    """Write ``config.json`` and ``weights.safetensors`` into a folder, whole files or none.

    A save into a folder that holds a transformer replaces it.

    Raises:
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: buffer.detach().cpu().contiguous() for name, buffer in transformer.named_buffers()}
    config: dict[str, Any] = {
        "format": _FORMAT,
        "version": 1,
        "kernel": transformer.kernel.config(),
        "n_layers": "inf" if transformer.infinite else len(transformer.step_sizes),
        "step_normalization": transformer.step_normalization,
        "ridge": transformer.ridge,
        "value_shift": transformer.value_shift,
        "n_landmarks": transformer.n_landmarks,
        "offset": transformer.offset,
    }
    weights = safetensors.save(tensors)
    # The configuration goes first and comes last: a folder without it is not a transformer, so a killed save leaves
    # nothing that loads, neither half of this transformer nor new numbers under the configuration of an old one.
    (path / _CONFIG).unlink(missing_ok=True)
    _replace(path / _WEIGHTS, weights)
    _replace(path / _CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def load(folder_or_name: str | os.PathLike[str]) -> InContextTransformer:
    """Read a transformer from a folder, or one that the package ships, by name.

    Raises:
        FileNotFoundError: Neither a folder with a transformer nor a shipped name.
        ValueError: A file that is truncated, of another format, or not safetensors. No code in it is run.
        ImportError: safetensors is not installed.
    """
    from icrl_gym.transformer import InContextTransformer

    safetensors = _safetensors()
    path = Path(folder_or_name)
    if not (path / _CONFIG).is_file():
        shipped_path = _shipped_folder() / str(folder_or_name)
        if str(folder_or_name) not in shipped():
            raise FileNotFoundError(
                f"no transformer at {str(folder_or_name)!r}: expected a folder with {_CONFIG} and {_WEIGHTS}, "
                f"or a shipped name ({', '.join(shipped()) or 'this version ships none'})."
            )
        path = shipped_path
    try:
        config = json.loads((path / _CONFIG).read_text())
        if not isinstance(config, dict) or config.get("format") != _FORMAT or config.get("version") != 1:
            raise ValueError(f"it does not say format {_FORMAT!r}, version 1")
        infinite = config["n_layers"] == "inf"
        transformer = InContextTransformer(
            make_kernel(**config["kernel"]),
            step_normalization=config["step_normalization"],
            n_layers=float("inf") if infinite else config["n_layers"],
            ridge=config["ridge"],
            value_shift=config["value_shift"],
            n_landmarks=config["n_landmarks"],
            offset=config["offset"],
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{path / _CONFIG} is not the configuration of a transformer: {reason}.") from error
    try:
        tensors = safetensors.load((path / _WEIGHTS).read_bytes())
    except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path / _WEIGHTS} is not a whole safetensors file ({error}). Pickled weights are not read; save them with "
            f"`save_pretrained`."
        ) from error
    try:
        transformer.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path / _WEIGHTS} does not fit {_CONFIG} beside it: {error}.") from error
    gamma, constants = transformer.gamma, list(transformer.kernel.buffers())
    in_range = bool(0 <= gamma <= 1) and all(bool((constant > 0).all()) for constant in constants)
    if not in_range or not all(bool(torch.isfinite(number).all()) for number in transformer.buffers()):
        raise ValueError(
            f"{path / _WEIGHTS} holds numbers out of their range: expected finite step sizes, gamma in [0, 1] and positive "
            f"constants of the kernel."
        )
    return transformer


def shipped() -> tuple[str, ...]:
    """The names of the transformers that the package ships."""
    folder = _shipped_folder()
    return tuple(sorted(p.name for p in folder.iterdir() if (p / _CONFIG).is_file())) if folder.is_dir() else ()


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

"""Observations as vectors: which spaces a context can hold, and a fast way to flatten one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

__all__ = ["flattener"]


def flattener(space: spaces.Space[Any]) -> tuple[Callable[[Any], np.ndarray], int, npt.DTypeLike]:
    """How observations of a space become vectors.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them.

    Returns:
        A function that flattens one observation to a copy, as ``gymnasium.spaces.flatten`` orders it; the number d of
        entries; the type that they are kept in (float64 for float64 observations, else float32).

    Raises:
        ValueError: A space of images, or one whose observations have no fixed number of entries.
    """
    for name, part in _parts(space):
        if isinstance(part, spaces.Box) and len(part.shape) == 3 and part.dtype == np.uint8:
            of = f"{name!r} of the observation space" if name else "the observation space"
            raise ValueError(
                f"RollingContext: {of} is an image, {part}: distances between raw pixels say little about values. "
                f"Encode images to a vector in a wrapper first, and put RollingContext outside of it."
            )
    if not space.is_np_flattenable:
        raise ValueError(
            f"RollingContext: observations of {space} have no fixed number of entries. Expected a Box, Discrete, "
            f"MultiDiscrete or MultiBinary space, or a Dict or Tuple of them; turn the observation into one in a wrapper first."
        )
    kinds = [part.dtype for _, part in _parts(space)]
    dtype = np.float64 if np.float64 in kinds else np.float32
    size = spaces.flatdim(space)
    if isinstance(space, spaces.Box):
        # `np.array` copies: an environment may write its next observation into the same memory.
        return (lambda observation: np.array(observation, dtype).ravel()), size, dtype
    return (lambda observation: np.array(spaces.flatten(space, observation), dtype)), size, dtype


def _parts(space: spaces.Space[Any], name: str = "") -> list[tuple[str, spaces.Space[Any]]]:
    """The leaves of a space, with the names of those inside a Dict or Tuple."""
    if isinstance(space, spaces.Dict):
        inner = [(str(key), part) for key, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        inner = [(str(index), part) for index, part in enumerate(space.spaces)]
    else:
        return [(name, space)]
    return [leaf for key, part in inner for leaf in _parts(part, f"{name}/{key}" if name else key)]

"""How far a long computation is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import sys
from typing import Any

__all__ = ["Progress"]


class Progress:
    """A bar on a terminal, with the extra `progress`; lines otherwise. Close it at the end, whatever happened.

    Args:
        label: What is computed.
        total: Steps in all; without any, nothing is shown.
        unit: What a step is, for the bar.
        n_lines: About so many lines, evenly spread over the steps (None: one a step).

    Example:
        >>> progress = Progress("grid", 4, "cell", n_lines=2)
        >>> for number in range(4):
        ...     progress.step(f"number {number}")
        grid: 2 of 4   number 1
        grid: 4 of 4   number 3
        >>> progress.close()
    """

    def __init__(self, label: str, total: int, unit: str, n_lines: int | None = None) -> None:
        self._label, self._total, self._done = label, total, 0
        self._lines = None if n_lines is None else {math.ceil(total * (i + 1) / n_lines) for i in range(n_lines)}
        self._bar: Any = None
        if total and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=label, unit=unit, dynamic_ncols=True)

    def step(self, note: str, rest: str | None = None) -> None:
        """One step more.

        Args:
            note: What there is to say of it, behind the bar.
            rest: Of a line, behind the number of steps (None: the note, set off).
        """
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif self._lines is None or self._done in self._lines:
            rest = f"   {note}" if rest is None else rest
            print(f"{self._label}: {self._done} of {self._total}{rest}", flush=True)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.close()

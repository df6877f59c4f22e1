"""Tables in Markdown, as the commands print them and the documents show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["markdown_table", "with_interval"]


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    r"""The rows as a table in Markdown, with a line for each.

    Args:
        rows: At least one; all with the keys of the first, which are the header. Floats get four digits, and NaN an empty cell.

    Returns:
        The text, with a line break at its end.

    Raises:
        ValueError: No rows.

    Example:
        >>> print(markdown_table([{"kernel": "rbf", "|b|": 0.123456}, {"kernel": "relu", "|b|": float("nan")}]), end="")
        | kernel | \|b\| |
        | --- | --- |
        | rbf | 0.1235 |
        | relu |  |
    """
    if not rows:
        raise ValueError("a table needs at least one row, whose keys are its header; got none.")
    header = list(rows[0])
    cells = [header, ["---"] * len(header), *([_cell(row[name]) for name in header] for row in rows)]
    # A bar inside of a cell would begin another one.
    return "".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |\n" for line in cells)


def with_interval(value: float, low: float, high: float, digits: int) -> str:
    """A number with its interval behind it.

    Args:
        value: NaN gives an empty cell.
        low: The lower end; NaN where there is no interval.
        high: The upper end.
        digits: Of each number, behind the point.

    Returns:
        The text.

    Example:
        >>> with_interval(0.5, 0.25, 0.75, 2), with_interval(0.5, float("nan"), float("nan"), 1)
        ('0.50 [0.25, 0.75]', '0.5')
    """
    if math.isnan(value):
        return ""
    return f"{value:.{digits}f}" + ("" if math.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return str(value)

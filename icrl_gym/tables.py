"""Tables in Markdown, as the commands print them and the documents show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["markdown_table"]


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


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return str(value)

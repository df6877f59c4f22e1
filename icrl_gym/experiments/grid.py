"""A grid of independent computations on workers, each remembered as a file, so that a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from icrl_gym.parallel import Workers, completed
from icrl_gym.progress import Progress
from icrl_gym.runs import write_whole

__all__ = ["run_grid"]


def run_grid(
    function: Callable[..., dict[str, Any]],
    cells: Sequence[Mapping[str, Any]],
    cache: Path,
    workers: Workers | int,
    label: str,
) -> list[dict[str, Any]]:
    """Compute ``function(**cell)`` for each cell, in parallel, and remember each result.

    Args:
        function: Of a module (workers import it); its result must be JSON. It draws its random numbers from its
            arguments alone, so the results do not depend on ``workers``.
        cells: The arguments; JSON too.
        cache: The folder of finished cells, which this process alone writes. A cell is found again by the function's
            name and its arguments.
        workers: Where to; a number is one of processes, and 1 computes here.
        label: For the progress lines.

    Returns:
        The results, in the order of the cells.

    Raises:
        ImportError: Ray is asked for and missing.
        ValueError: Fewer than one job, or no Ray answers at the address.
    """
    workers = Workers(workers) if isinstance(workers, int) else workers
    cache.mkdir(parents=True, exist_ok=True)
    files = [cache / f"{_key(function, cell)}.json" for cell in cells]
    first = {file: index for index, file in reversed(list(enumerate(files)))}  # cells may be equal
    missing = sorted(index for file, index in first.items() if not _is_known(file))
    if missing:
        print(f"{label}: {len(first)} cells, {len(first) - len(missing)} known, {len(missing)} to compute", flush=True)
    with closing(Progress(label, len(missing), "cell")) as progress:

        def keep(index: int, result: dict[str, Any]) -> None:
            write_whole(files[index], json.dumps({"cell": dict(cells[index]), "result": result}) + "\n")
            progress.step(_short(cells[index]))

        if missing and (workers.backend == "ray" or (workers.jobs > 1 and len(missing) > 1)):
            calls = {index: (function, dict(cells[index])) for index in missing}
            with (
                workers.executor(len(missing)) as executor,
                closing(completed(_call, calls, executor, workers.at_once(len(missing)))) as ended,
            ):
                for index, future in ended:
                    keep(index, future.result())
        else:
            for index in missing:
                keep(index, function(**cells[index]))
    return [json.loads(file.read_text())["result"] for file in files]


def _call(function: Callable[..., dict[str, Any]], cell: Mapping[str, Any]) -> dict[str, Any]:
    return function(**cell)


def _is_known(file: Path) -> bool:
    """Whether a cell is there and whole; a damaged one is computed again."""
    try:
        return "result" in json.loads(file.read_text())
    except (FileNotFoundError, ValueError, TypeError):
        return False


def _key(function: Callable[..., Any], cell: Mapping[str, Any]) -> str:
    text = json.dumps([function.__qualname__, dict(cell)], sort_keys=True)
    return f"{function.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def _short(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in cell.items() if isinstance(value, (str, int, float)))

"""A grid of independent computations on a process pool, each remembered as a file, so that a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from icrl_gym.runs import write_whole

__all__ = ["run_grid"]


def run_grid(
    function: Callable[..., dict[str, Any]], cells: Sequence[Mapping[str, Any]], cache: Path, jobs: int, label: str
) -> list[dict[str, Any]]:
    """Compute ``function(**cell)`` for each cell, in parallel, and remember each result.

    Args:
        function: Of a module (worker processes import it); its result must be JSON. It draws its random numbers from
            its arguments alone, so the results do not depend on ``jobs``.
        cells: The arguments; JSON too.
        cache: The folder of finished cells. A cell is found again by the function's name and its arguments.
        jobs: Processes; 1 computes here.
        label: For the progress lines.

    Returns:
        The results, in the order of the cells.
    """
    cache.mkdir(parents=True, exist_ok=True)
    files = [cache / f"{_key(function, cell)}.json" for cell in cells]
    first = {file: index for index, file in reversed(list(enumerate(files)))}  # cells may be equal
    missing = sorted(index for file, index in first.items() if not file.is_file())
    if missing:
        print(f"{label}: {len(first)} cells, {len(first) - len(missing)} known, {len(missing)} to compute", flush=True)

    def keep(index: int, result: dict[str, Any], done: int) -> None:
        write_whole(files[index], json.dumps({"cell": dict(cells[index]), "result": result}) + "\n")
        print(f"{label}: {done} of {len(missing)}   {_short(cells[index])}", flush=True)

    if jobs == 1 or len(missing) < 2:
        for done, index in enumerate(missing, 1):
            keep(index, function(**cells[index]), done)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            min(jobs, len(missing)), context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            futures = {pool.submit(function, **cells[index]): index for index in missing}
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    keep(futures[future], future.result(), done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [json.loads(file.read_text())["result"] for file in files]


def _key(function: Callable[..., Any], cell: Mapping[str, Any]) -> str:
    text = json.dumps([function.__qualname__, dict(cell)], sort_keys=True)
    return f"{function.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def _short(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in cell.items() if isinstance(value, (str, int, float)))

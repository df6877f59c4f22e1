"""Run folders: what was run, how far it got, and whole files whatever happens.

config.json           the resolved settings
run.json              command, versions, seed, start, end, status, steps per second
episodes.csv          one row an episode: timesteps, return, length, success
evaluations.csv       one row an evaluation episode on held-out goals, if the run has any: timesteps, episode, task, return, length,
                      success
tensorboard/          events, for `tensorboard --logdir`
progress_<steps>.csv  SB3's logger as a table, one file for each start at so many steps
checkpoints/          the newest two, each a whole folder
model.zip             the trained model (and vecnormalize.pkl beside it), once the run has finished
learning_curve.png    with the extra `plots`

A finished run that goes no further needs config.json, run.json and the two tables only; the rest may be deleted.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from icrl_gym.context import Context

try:
    import fcntl
except ImportError:  # Windows, where two processes in one folder are not told apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["Episode", "EvaluationEpisode", "FolderInUseError", "RunFolder", "folder_lock", "versions", "write_whole"]

_CONTEXT_FIELDS = ("states", "rewards", "next_states", "terminated", "truncated")


class FolderInUseError(ValueError):
    """Another process is at work in a run's folder."""


@dataclass(frozen=True)
class Episode:
    """One finished episode.

    Attributes:
        timesteps: Environment steps of the whole run when it ended.
        episode_return: The sum of its raw rewards.
        length: Its steps.
        success: 1 or 0; None where the environment does not say.
    """

    timesteps: int
    episode_return: float
    length: int
    success: float | None


@dataclass(frozen=True)
class EvaluationEpisode:
    """One episode of an evaluation, played with deterministic actions on a held-out goal.

    Attributes:
        timesteps: Environment steps that the run had trained for.
        episode: Its number within the evaluation; the same number has the same goal in every evaluation of a run.
        task: The environment's name.
        episode_return: The sum of its raw rewards.
        length: Its steps.
        success: 1 or 0; None where the environment does not say.
    """

    timesteps: int
    episode: int
    task: str
    episode_return: float
    length: int
    success: float | None


class RunFolder:
    """A run's folder; see the module's own text for what is in it.

    Args:
        path: Where. It need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved settings.

        Raises:
            FileNotFoundError: No run is here.
            ValueError: What is here is not JSON.
        """
        if not self.started:
            raise FileNotFoundError(
                f"no run at {str(self.path)!r}: expected a folder with config.json, made by `icrl-gym train`."
            )
        return _read_json(self.path / "config.json")

    @property
    def status(self) -> dict[str, Any]:
        """What run.json says; empty before the start.

        Raises:
            ValueError: What is here is not JSON.
        """
        file = self.path / "run.json"
        return _read_json(file) if file.is_file() else {}

    @property
    def started(self) -> bool:
        """Whether a run is here: its settings are what a run writes first."""
        return (self.path / "config.json").is_file()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.started and self.status.get("status") == "finished"

    @property
    def holds_files(self) -> bool:
        """Whether anything is here but a lock and what a killed process had begun to write."""
        there = self.path.iterdir() if self.path.exists() else ()
        return any(p.name != ".lock" and not p.name.startswith(".partial_") for p in there)

    def write_config(self, config: dict[str, Any]) -> None:
        """Keep the resolved settings."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "config.json", json.dumps(config, indent=2) + "\n")

    def update_status(self, **entries: Any) -> None:
        """Add entries to run.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "run.json", json.dumps({**self.status, **entries}, indent=2) + "\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep the folder to one process at a time.

        Raises:
            FolderInUseError: Another process is at work here.
        """
        with folder_lock(self.path):
            yield

    def sweep(self) -> None:
        """Remove what a killed process had begun to write."""
        for partial in [*self.path.glob(".partial_*"), *self.path.glob("checkpoints/.partial_*")]:
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)

    def forget_after(self, timesteps: int) -> None:
        """Forget what a run that goes on from there will do again: episodes, evaluations, and from its beginning its events.

        Events after a checkpoint stay, and their later readers hide them (``purge_step``).
        """
        self.drop_episodes_after(timesteps)
        self.drop_evaluations_after(timesteps)
        if not timesteps:
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    # Checkpoints

    @property
    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        found = folder.glob("step_*") if folder.is_dir() else []
        return sorted(p for p in found if p.is_dir() and p.name.removeprefix("step_").isdecimal())

    def save_checkpoint(self, model: Any, keep: int = 2) -> Path:
        """Save model, normalization statistics and contexts; the newest ``keep`` checkpoints stay.

        Written beside and then renamed: a folder named ``step_...`` is whole, or is not there.
        """
        folder = self.path / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / f"step_{model.num_timesteps:010d}"
        if final.exists():
            return final
        partial = folder / f".partial_{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        model.save(partial / "model.zip")
        normalize = model.get_vec_normalize_env()
        if normalize is not None:
            normalize.save(str(partial / "vecnormalize.pkl"))
        if model.env.has_attr("context_snapshot"):
            save_contexts(partial / "contexts.npz", [s.context for s in model.env.env_method("context_snapshot")])
        os.replace(partial, final)
        for old in self.checkpoints[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def finish(self, checkpoint: Path) -> None:
        """Put the model of the last checkpoint at the top of the folder."""
        for name in ("model.zip", "vecnormalize.pkl"):
            if (checkpoint / name).is_file():
                partial = self.path / f".partial_{name}"
                shutil.copyfile(checkpoint / name, partial)
                os.replace(partial, self.path / name)

    # Episodes

    def append_episodes(self, episodes: Iterable[Episode]) -> None:
        """Add rows to episodes.csv."""
        file = self.path / "episodes.csv"
        text = _episode_rows(episodes, header=not file.exists())
        with file.open("a", newline="") as stream:
            stream.write(text)

    def read_episodes(self) -> list[Episode]:
        """The rows of episodes.csv; a last one that a killed process left incomplete is dropped."""
        file = self.path / "episodes.csv"
        if not file.is_file():
            return []
        episodes = []
        for row in csv.DictReader(file.read_text().splitlines()):
            if None in row.values():  # torn before its last comma: the length may have lost digits
                continue
            try:
                numbers = int(row["timesteps"]), float(row["return"]), int(row["length"])
                episodes.append(Episode(*numbers, _read_success(row["success"])))
            except (TypeError, ValueError):
                continue
        return episodes

    def drop_episodes_after(self, timesteps: int) -> None:
        """Forget episodes that a resumed run will play again."""
        file = self.path / "episodes.csv"
        if file.exists():
            kept = [e for e in self.read_episodes() if e.timesteps <= timesteps]
            write_whole(file, _episode_rows(kept, header=True))

    # Evaluations

    def append_evaluation(self, rows: Iterable[EvaluationEpisode]) -> None:
        """Add the episodes of an evaluation to evaluations.csv: all of them, or none if the process is killed."""
        self._write_evaluations([*self.read_evaluations(), *rows])

    def read_evaluations(self) -> list[EvaluationEpisode]:
        """The rows of evaluations.csv; none without that file.

        Raises:
            ValueError: The file is not what a run writes there.
        """
        file = self.path / "evaluations.csv"
        if not file.is_file():
            return []
        try:
            return [
                EvaluationEpisode(
                    int(row["timesteps"]), int(row["episode"]), row["task"], float(row["return"]), int(row["length"]),
                    _read_success(row["success"]),
                )
                for row in csv.DictReader(file.read_text().splitlines())
            ]  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{str(file)!r} is not what `icrl-gym train` writes there ({type(error).__name__}: {error})."
            ) from None

    def drop_evaluations_after(self, timesteps: int) -> None:
        """Forget evaluations that a resumed run will make again."""
        rows = self.read_evaluations()
        kept = [row for row in rows if row.timesteps <= timesteps]
        if len(kept) < len(rows):
            self._write_evaluations(kept)

    def _write_evaluations(self, rows: Iterable[EvaluationEpisode]) -> None:
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["timesteps", "episode", "task", "return", "length", "success"])
        for r in rows:
            writer.writerow(
                [r.timesteps, r.episode, r.task, repr(r.episode_return), r.length, _success_cell(r.success)]
            )
        write_whole(self.path / "evaluations.csv", text.getvalue())


@contextlib.contextmanager
def folder_lock(folder: Path, waiting: str | None = None) -> Iterator[None]:
    """Keep a folder to one process at a time.

    The lock is the system's and goes with the process, however it ends.

    Args:
        folder: Made if need be.
        waiting: What to print before waiting for another process. None: do not wait.

    Raises:
        FolderInUseError: Another process is at work here, and ``waiting`` is None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise FolderInUseError(
                        f"another process is at work in {str(folder)!r}; wait for it, or stop it first."
                    ) from None
                print(waiting, flush=True)
                fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def save_contexts(file: Path, contexts: Sequence[Context]) -> None:
    """Write one context an environment into an npz file (no pickle in it)."""
    arrays = {
        f"{index}/{name}": getattr(context, name).numpy()
        for index, context in enumerate(contexts)
        for name in _CONTEXT_FIELDS
    }
    np.savez(file, **arrays)


def load_contexts(file: Path) -> list[Context]:
    """Read what :func:`save_contexts` wrote."""
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        n = 1 + max((int(key.split("/")[0]) for key in arrays), default=-1)
        return [Context(*(arrays[f"{index}/{name}"] for name in _CONTEXT_FIELDS)) for index in range(n)]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(file)!r} is not what `icrl-gym train` writes there: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{str(file)!r} is not what `icrl-gym train` writes there: expected a JSON object.")
    return content


def versions() -> dict[str, str]:
    """The versions of Python and of what results depend on."""
    packages = ("icrl-gym", "torch", "stable-baselines3", "gymnasium", "metaworld", "mujoco", "numpy")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _episode_rows(episodes: Iterable[Episode], header: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    if header:
        writer.writerow(["timesteps", "return", "length", "success"])
    for e in episodes:
        writer.writerow([e.timesteps, repr(e.episode_return), e.length, _success_cell(e.success)])
    return text.getvalue()


def _success_cell(success: float | None) -> float | str:
    return "" if success is None else success


def _read_success(cell: str) -> float | None:
    return float(cell) if cell else None


def write_whole(file: Path, text: str) -> None:
    """Write beside and rename: whatever happens, the file is the old one or the new one, whole."""
    partial = file.with_name(f".partial_{file.name}")
    # newline="": line ends are written as they are, on every system.
    with partial.open("w", newline="") as stream:
        stream.write(text)
    os.replace(partial, file)

"""Recorded transitions of Meta-World's scripted experts, as Minari datasets, and contexts out of anybody's Minari dataset.

A dataset is one task at one noise level: `icrl_gym/reach-v3/high-v0` holds reach-v3 with noise of standard deviation
1.0 on the expert's actions. Each of its episodes has another goal and says how to play it again: its `seed` is what
`reset` was given, its metadata's `noise_seed` started the expert's noise, `goal` is the goal's index.

Any tool that reads Minari reads it: `minari.load_dataset("icrl_gym/reach-v3/high-v0")`. What recording adds is in the
dataset's metadata under `icrl_gym`: the settings, the versions of the packages, and a checksum of the arrays.

Source:
    He et al. 2026 evaluate on scripted experts at a low, a medium and a high noise level. The numbers behind the three
    words, `NOISE_LEVELS`, are our reading of them.
    Younis et al. 2024, "Minari" (Farama Foundation): the format, one HDF5 group an episode.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import shutil
import time
import zlib
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from icrl_gym._typing import Bool, Float, Int
from icrl_gym.context import Context
from icrl_gym.metaworld import MAX_EPISODE_STEPS, PAPER_DOMAINS, TASKS, ScriptedExpert, make_env, resolve_task
from icrl_gym.parallel import completed, spawned
from icrl_gym.runs import folder_lock, versions, write_whole
from icrl_gym.wrappers.flattening import flattener

if TYPE_CHECKING:
    from minari import MinariDataset
else:
    MinariDataset = Any  # an extra: the module imports without it, and the test run checks every annotation

__all__ = [
    "NOISE_LEVELS",
    "CollectConfig",
    "Transitions",
    "collect",
    "context_from_minari",
    "contexts",
    "dataset_id",
    "load_dataset",
    "load_transitions",
]

NOISE_LEVELS: dict[str, float] = {"low": 0.1, "medium": 0.5, "high": 1.0}
"""Standard deviations of the Gaussian noise on the expert's actions, whose range is [-1, 1]: our reading of the noise
levels of He et al. 2026."""

NoiseLevel = Literal["low", "medium", "high"]

_INSTALL = 'pip install "icrl-gym[data]"'
_NAMESPACE = "icrl_gym"
_FORMAT = 1  # of what a seed means: another way of drawing goals or noise gets another number
_ARRAYS = ("observations", "actions", "rewards", "terminations", "truncations")
_MAX_SEED = 2**32


@dataclass
class CollectConfig:
    """Record Meta-World's scripted experts with noisy actions, as Minari datasets; what is there already is kept."""

    tasks: tuple[str, ...] = PAPER_DOMAINS
    """Meta-World tasks, such as reach or drawer-close; "all" for the fifty."""
    noise: tuple[NoiseLevel, ...] = ("low", "medium", "high")
    """Noise on the actions: standard deviation 0.1, 0.5, 1.0. One dataset a task and level."""
    episodes: int = 10
    """Episodes a dataset, each with another goal (after fifty, the goals come round again)."""
    steps: int = 100
    """Steps an episode, at most 500."""
    seed: int = 0
    """Determines goals and noise. The numbers do not depend on jobs, nor on what else is collected."""
    jobs: int = 2
    """Datasets at a time, each in a process of its own."""
    root: str | None = None
    """Where datasets go (None: Minari's own folder, MINARI_DATASETS_PATH or ~/.minari/datasets)."""
    force: bool = False
    """Collect again and replace what is there."""


@dataclass(frozen=True)
class Transitions:
    """The transitions of a dataset as arrays, in their order.

    Attributes:
        states: (N, d) float64, flattened observations.
        rewards: (N,) float64, in the units of the environment.
        next_states: (N, d) float64: where the transition led, before any reset.
        terminated: (N,) bool. The episode ended here.
        truncated: (N,) bool. The episode was cut here; also True on an episode's last transition where the dataset says
            neither, for nothing follows it.
        episode: (N,) int, the episode's index in the dataset.
    """

    states: Float[np.ndarray, "N d"]
    rewards: Float[np.ndarray, " N"]
    next_states: Float[np.ndarray, "N d"]
    terminated: Bool[np.ndarray, " N"]
    truncated: Bool[np.ndarray, " N"]
    episode: Int[np.ndarray, " N"]

    def __len__(self) -> int:
        """The number N of transitions."""
        return len(self.rewards)

    def context(self, rows: npt.ArrayLike | slice = slice(None)) -> Context:
        """Transitions as a context, in float64.

        Args:
            rows: Which ones. An array of shape (..., n) gives a batch of contexts, one for each row of it.

        Returns:
            A context of n transitions, with batch shape (...).

        Raises:
            ValueError: A state or reward among them is not finite.
        """
        index = rows if isinstance(rows, slice) else np.asarray(rows, np.intp)
        # Copies: tensors would share the memory of the arrays that a slice gives.
        fields = (self.states, self.rewards, self.next_states, self.terminated, self.truncated)
        return Context(*(np.array(field[index]) for field in fields))


# Recording


def dataset_id(task: str, noise: str) -> str:
    """Returns the name of a recorded dataset.

    Args:
        task: A Meta-World task's name, see `resolve_task`.
        noise: One of `NOISE_LEVELS`.

    Raises:
        ValueError: If there is no such task or level.

    Example:
        >>> dataset_id("reach", "high")
        'icrl_gym/reach-v3/high-v0'
    """
    if noise not in NOISE_LEVELS:
        raise ValueError(f"unknown noise level {noise!r}; expected one of {', '.join(map(repr, NOISE_LEVELS))}")
    return f"{_NAMESPACE}/{resolve_task(task)}/{noise}-v0"


def collect(config: CollectConfig) -> list[str]:
    """Records the datasets that are not there yet, each of them whole or not at all.

    A dataset is written beside and then renamed, so that a killed process leaves nothing half-written, and what it had
    finished stays. A dataset that is there with the same settings is checked against its checksum and kept. Two
    processes that record into one folder take turns.

    Args:
        config: The settings. With `jobs` above 1, a script that calls this needs `if __name__ == "__main__":`, because
            worker processes import it.

    Returns:
        The ids of the datasets, tasks first, then noise levels in their given order; each name once.

    Raises:
        ValueError: Settings that cannot work; a dataset that is there with other settings, or is damaged (`force`
            replaces both).
        ImportError: Minari is missing.
        RuntimeError: Recording a dataset failed; the others went on to their ends.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:  # doctest: +ELLIPSIS
        ...     config = CollectConfig(tasks=("drawer-close",), noise=("low",), episodes=1, steps=5, root=root)
        ...     ids = collect(config)
        ...     context = context_from_minari(ids[0], root=root)
        1 dataset, 0 there already, 1 to record in ...
          1 of 1   icrl_gym/drawer-close-v3/low-v0 ...
        >>> ids, context
        (['icrl_gym/drawer-close-v3/low-v0'], Context(n=5, d=39))
    """
    _require_minari("h5py")
    wanted = _settings(config)
    root = _root(config.root)
    missing = _missing(root, wanted, config.force)
    if not missing:
        return list(wanted)
    recorded_into = root / _NAMESPACE
    with folder_lock(recorded_into, f"another process records into {str(recorded_into)!r}; waiting for it ..."):
        _sweep(root / _NAMESPACE)
        # Again: another process may have recorded them while this one waited.
        missing = _missing(root, wanted, config.force)
        if not missing:
            return list(wanted)
        n = len(wanted)
        print(f"{n} dataset{'s' * (n > 1)}, {n - len(missing)} there already, {len(missing)} to record in {root}")
        failures: dict[str, Exception] = {}
        done = 0
        # Closed at once when something is raised in between, so that no further recording is started.
        with contextlib.closing(_record_all({name: wanted[name] for name in missing}, config.jobs)) as results:
            for name, result in results:
                done += 1
                if isinstance(result, Exception):
                    failures[name] = result
                    print(f"{done:3d} of {len(missing)}   {name} failed: {result}", flush=True)
                    continue
                _write(root, name, wanted[name], result)
                success = np.mean([episode.success[-1] for episode in result.episodes])
                print(
                    f"{done:3d} of {len(missing)}   {name:45s} {config.episodes * config.steps:7,} transitions, "
                    f"success in {success:4.0%} of the episodes, {result.seconds:5.1f} s",
                    flush=True,
                )
    for name, failure in failures.items():
        raise RuntimeError(f"{name} failed: {failure}; the same command tries it again") from failure
    return list(wanted)


def _settings(config: CollectConfig) -> dict[str, dict[str, Any]]:
    """What each dataset is determined by, under its id.

    Raises:
        ValueError: Settings that cannot work.
    """
    for field, least, most in (("episodes", 1, None), ("steps", 1, MAX_EPISODE_STEPS), ("jobs", 1, None)):
        value = getattr(config, field)
        if value < least or (most is not None and value > most):
            expected = f"at least {least}" if most is None else f"in {least} ... {most}, Meta-World's own limit"
            raise ValueError(f"--{field} must be {expected}; received {value}.")
    if not 0 <= config.seed < _MAX_SEED:
        raise ValueError(f"--seed must be in 0 ... 2**32 - 1; received {config.seed}.")
    if not config.tasks:
        raise ValueError('--tasks must name at least one Meta-World task, or "all"; received none.')
    if not config.noise:
        raise ValueError(f"--noise must name at least one level of {', '.join(NOISE_LEVELS)}; received none.")
    tasks: list[str] = []
    for name in config.tasks:
        tasks.extend(TASKS if name.strip().lower() == "all" else [resolve_task(name)])
    return {
        dataset_id(task, level): {
            "format": _FORMAT,
            "task": task,
            "noise_level": level,
            "noise": NOISE_LEVELS[level],
            "episodes": config.episodes,
            "steps": config.steps,
            "seed": config.seed,
        }
        for task in tasks
        for level in config.noise
    }


def _missing(root: Path, wanted: dict[str, dict[str, Any]], force: bool) -> list[str]:
    """The datasets to record.

    Raises:
        ValueError: One is there with other settings, or damaged.
    """
    if force:
        return list(wanted)
    missing = []
    for name, settings in wanted.items():
        if not (root / name / "data").is_dir():
            missing.append(name)
            continue
        dataset = load_dataset(name, root)
        stored = (dataset.storage.metadata.get("icrl_gym") or {}).get("settings", {})
        differing = [
            f"{key} {stored.get(key)!r} instead of {value!r}"
            for key, value in settings.items()
            if stored.get(key) != value
        ]
        if differing:
            raise ValueError(
                f"{str(root / name)!r} is there with {', '.join(differing)}. Give --force to replace it, or another --root."
            )
    return missing


@dataclass(frozen=True)
class _Episode:
    """One recorded episode of T steps; the arrays have the names that Minari gives them."""

    seed: int
    noise_seed: int
    goal: int
    observations: np.ndarray  # (T+1, 39) float32
    actions: np.ndarray  # (T, 4) float32
    rewards: np.ndarray  # (T,) float64
    terminations: np.ndarray  # (T,) bool
    truncations: np.ndarray  # (T,) bool
    success: np.ndarray  # (T+1,) bool: from the first success on


@dataclass(frozen=True)
class _Recording:
    episodes: list[_Episode]
    observation_space: spaces.Space
    action_space: spaces.Space
    seconds: float


def _record(settings: dict[str, Any]) -> _Recording:
    """Plays the episodes of one dataset, in an environment of its own, so that nothing else has a say in them."""
    started = time.perf_counter()
    task, seed, n_steps = settings["task"], settings["seed"], settings["steps"]
    env = make_env(task, seed=seed, max_episode_steps=n_steps)
    # Without the noise level: all levels of a task show the same goals in the same order.
    seeds = np.random.default_rng(_seed(seed, task, "goals"))
    n_goals = len(env.get_wrapper_attr("_tasks"))
    seen: set[int] = set()
    episodes = []
    for index in range(settings["episodes"]):
        if len(seen) == n_goals:
            seen.clear()
        while True:
            episode_seed = int(seeds.integers(_MAX_SEED))
            observation, _ = env.reset(seed=episode_seed)
            goal = int(env.get_wrapper_attr("goal_index"))
            if goal not in seen:
                break
        seen.add(goal)
        noise_seed = _seed(seed, task, settings["noise_level"], index)
        expert = ScriptedExpert(task, noise=settings["noise"], seed=noise_seed)
        observations, success = [observation], [False]
        actions, rewards, terminations, truncations = [], [], [], []
        for _ in range(n_steps):
            action = expert(observation)
            observation, reward, terminated, truncated, info = env.step(action)
            observations.append(observation)
            actions.append(action)
            rewards.append(reward)
            terminations.append(terminated)
            truncations.append(truncated)
            success.append(info["is_success"])
            if terminated or truncated:
                break
        episodes.append(
            _Episode(
                episode_seed,
                noise_seed,
                goal,
                np.array(observations),
                np.array(actions),
                np.array(rewards, np.float64),
                np.array(terminations, np.bool_),
                np.array(truncations, np.bool_),
                np.array(success, np.bool_),
            )
        )
    env.close()
    return _Recording(episodes, env.observation_space, env.action_space, time.perf_counter() - started)


def _seed(*words: int | str) -> int:
    """One seed of 32 bits from numbers and names, the same in every process (unlike `hash`)."""
    entropy = [zlib.crc32(word.encode()) if isinstance(word, str) else word for word in words]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _record_all(
    wanted: dict[str, dict[str, Any]], jobs: int
) -> Generator[tuple[str, _Recording | Exception], None, None]:
    """The recordings, or what went wrong, as they come."""
    result: _Recording | Exception
    jobs = min(jobs, len(wanted))
    if jobs == 1:
        for name, settings in wanted.items():
            try:
                result = _record(settings)
            except Exception as error:
                result = error
            yield name, result
        return
    calls = {name: (settings,) for name, settings in wanted.items()}
    with (
        ProcessPoolExecutor(jobs, **spawned()) as pool,
        contextlib.closing(completed(_record, calls, pool, jobs)) as ended,
    ):
        for name, future in ended:
            try:
                result = future.result()
            except Exception as error:
                result = error
            yield name, result


# Files


def _write(root: Path, name: str, settings: dict[str, Any], recording: _Recording) -> None:
    """Writes a dataset beside its place and renames it: whatever happens, the old one or the new one is there, whole."""
    folder = root / name
    # Hidden, because Minari lists every other folder as a dataset.
    partial, replaced = (folder.with_name(f".{word}_{folder.name}") for word in ("partial", "replaced"))
    try:
        _write_to(partial, folder, name, settings, recording)
        if folder.exists():
            os.replace(folder, replaced)  # aside first: a folder takes the place of an empty one only
        os.replace(partial, folder)
    finally:
        _sweep(root / _NAMESPACE)


def _write_to(partial: Path, folder: Path, name: str, settings: dict[str, Any], recording: _Recording) -> None:
    """Writes into `partial` what is going to be `folder`."""
    # Minari's `create_dataset_from_buffers` knows one folder only, that of an environment variable; its storage, which
    # that function uses, takes any.
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    # Minari calls `icrl_gym/reach-v3` a namespace, and knows one by this file.
    for namespace in (folder.parent.parent, folder.parent):
        namespace.mkdir(parents=True, exist_ok=True)
        if not (namespace / "namespace_metadata.json").exists():
            write_whole(namespace / "namespace_metadata.json", "{}")
    partial.mkdir()
    storage = MinariStorage.new(
        partial / "data",
        observation_space=recording.observation_space,
        action_space=recording.action_space,
        data_format="hdf5",
    )
    task, episodes, made_by = settings["task"], recording.episodes, versions()
    storage.update_metadata(
        {
            "dataset_id": name,
            "minari_version": minari.__version__,
            "author": {"icrl-gym"},
            "algorithm_name": f"Meta-World's scripted policy with Gaussian noise of standard deviation {settings['noise']}",
            "description": (
                f"Meta-World's {task}, {len(episodes)} episodes of {settings['steps']} steps, each with another goal. "
                f"The environment: icrl_gym.metaworld.make_env({task!r}, seed={settings['seed']}, "
                f"max_episode_steps={settings['steps']}), reset with the seed of the episode."
            ),
            "requirements": [f"{package}=={made_by[package]}" for package in ("metaworld", "mujoco", "gymnasium")],
            "icrl_gym": {"settings": settings, "versions": made_by, "sha256": _checksum(episodes)},
        }
    )
    storage.update_episodes(
        EpisodeBuffer(
            seed=episode.seed,
            infos={"success": episode.success},
            **{array: getattr(episode, array) for array in _ARRAYS},
        )
        for episode in episodes
    )
    storage.update_episode_metadata([{"goal": e.goal, "noise_seed": e.noise_seed} for e in episodes])


def _checksum(episodes: Sequence[Any]) -> str:
    """The SHA-256 over the arrays of all episodes, with their types and shapes: first all observations, then actions, ..."""
    digest = hashlib.sha256()
    for name in _ARRAYS:
        for episode in episodes:
            array = np.ascontiguousarray(getattr(episode, name))
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _sweep(folder: Path) -> None:
    """Removes what was begun and not finished. Under the lock: none of it is somebody else's."""
    for replaced in folder.glob("*/.replaced_*"):
        whole = replaced.with_name(replaced.name.removeprefix(".replaced_"))
        if whole.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:  # ended between the two renames: the old one goes back
            os.replace(replaced, whole)
    for partial in folder.glob("*/.partial_*"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)


def _root(root: str | os.PathLike[str] | None) -> Path:
    """The folder of the datasets, Minari's own if None."""
    if root is not None:
        return Path(root).expanduser().absolute()  # Minari joins a relative one to itself
    from minari.storage.datasets_root_dir import get_dataset_path

    return get_dataset_path("")


def _require_minari(*also: str) -> None:
    """Imports Minari, and what stores its data, to say early what is missing.

    Raises:
        ImportError: With the remedy.
    """
    for package in ("minari", *also):
        try:
            __import__(package)
        except ImportError as error:
            raise ImportError(f"recorded datasets need {package}; {_INSTALL} brings it ({error}).") from error


def load_dataset(dataset_id: str, root: str | os.PathLike[str] | None = None) -> MinariDataset:
    """Opens a Minari dataset of this machine, and verifies the checksum of a recorded one.

    Args:
        dataset_id: Such as `"icrl_gym/reach-v3/high-v0"`, or anybody's, such as `"D4RL/door/human-v2"`.
        root: The folder of the datasets. None: Minari's own, MINARI_DATASETS_PATH or ~/.minari/datasets.

    Returns:
        The `minari.MinariDataset`.

    Raises:
        FileNotFoundError: There is no such dataset.
        ValueError: A file of it is damaged; the message names it.
        ImportError: Minari, or what it reads the dataset's format with, is missing.
    """
    _require_minari()
    import minari

    folder = _root(root) / dataset_id / "data"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no Minari dataset {dataset_id!r} in {str(_root(root))!r}. `icrl-gym collect` records those of Meta-World's "
            f"experts, `minari download {dataset_id}` fetches a published one, and `minari list local` names what is there."
        )
    remedy = "Delete the dataset and get it again (one of ours: `icrl-gym collect` with --force)."
    file = folder / "metadata.json"
    try:
        metadata = json.loads(file.read_text())
        recorded = metadata.get("icrl_gym")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{str(file)!r} is damaged: {error}. {remedy}") from error
    if recorded is None or metadata.get("minari_version") not in minari.supported_dataset_versions:
        return minari.MinariDataset(
            folder
        )  # somebody else's, or written by a newer Minari, which this one refuses itself
    file = folder / "main_data.hdf5"
    try:
        dataset = minari.MinariDataset(folder)
        found = _checksum(list(dataset.iterate_episodes()))
    except ImportError:
        raise
    except Exception as error:  # whatever HDF5 finds in a damaged file
        raise ValueError(f"{str(file)!r} is damaged: {error}. {remedy}") from error
    if found != recorded.get("sha256"):
        raise ValueError(
            f"{str(file)!r} is damaged: its arrays have SHA-256 {found}, recorded was {recorded.get('sha256')}. {remedy}"
        )
    return dataset


# Contexts


def load_transitions(
    dataset: MinariDataset | str,
    *,
    episodes: Iterable[int] | None = None,
    n: int | None = None,
    root: str | os.PathLike[str] | None = None,
) -> Transitions:
    """Reads the transitions of any Minari dataset whose observations flatten.

    Observations are flattened as `icrl_gym.wrappers.RollingContext` flattens them: `gymnasium.spaces.flatten`, one-hot
    codes for discrete parts.

    Args:
        dataset: A `minari.MinariDataset`, or an id for `load_dataset`.
        episodes: The indices of the episodes to read, in this order, out of `dataset.episode_indices`. None: all.
        n: Stops after so many transitions. None: reads all.
        root: With an id, see `load_dataset`.

    Returns:
        The transitions, in the order of the episodes and their steps.

    Raises:
        ValueError: Observations that make no state (images, sequences, graphs), an episode that is not there or is
            named twice, or one that does not have one observation more than rewards; and whatever `load_dataset`
            raises.
    """
    if isinstance(dataset, str):
        dataset = load_dataset(dataset, root)
    space = _observation_space(dataset)
    try:
        _, size, dtype = flattener(space)
    except ValueError as error:
        raise ValueError(
            f"the observations of {dataset.id!r} make no states of a context: {space}. Expected a Box (not of images), "
            f"Discrete, MultiDiscrete or MultiBinary space, or a Dict or Tuple of them; encode the observations to "
            f"vectors and store those as a dataset first."
        ) from error
    there = [int(index) for index in dataset.episode_indices]
    wanted = there if episodes is None else [operator.index(index) for index in episodes]
    unknown = sorted(set(wanted) - set(there))
    if unknown:
        raise ValueError(
            f"{dataset.id!r} has no episode {unknown[0]}; its {len(there)} episodes are "
            f"{there if len(there) <= 10 else f'{there[:3]} ... {there[-1]}'}."
        )
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"each episode once, please; received {wanted}.")
    states, rewards, next_states, terminated, truncated, episode_of = [], [], [], [], [], []
    n_read = 0
    for index, episode in zip(wanted, dataset.iterate_episodes(wanted) if wanted else (), strict=False):
        length = len(episode.rewards) if n is None else min(len(episode.rewards), n - n_read)
        flat = _flatten(space, episode.observations).astype(dtype, copy=False)
        if len(flat) != len(episode.rewards) + 1:
            raise ValueError(
                f"episode {index} of {dataset.id!r} has {len(flat)} observations and {len(episode.rewards)} rewards; "
                f"expected one observation more than rewards, the last transition's next one."
            )
        ended = np.asarray(episode.terminations, np.bool_)
        cut = np.array(episode.truncations, np.bool_)
        if len(cut) and not ended[-1]:
            cut[-1] = True  # nothing follows, whether or not the dataset says so
        states.append(flat[:length])
        next_states.append(flat[1 : length + 1])
        rewards.append(np.asarray(episode.rewards, np.float64)[:length])
        terminated.append(ended[:length])
        truncated.append(cut[:length])
        episode_of.append(np.full(length, index))
        n_read += length
        if n_read == n:
            break
    if not states:
        states = next_states = [np.zeros((0, size))]
        rewards, terminated, truncated = [np.zeros(0)], [np.zeros(0, np.bool_)], [np.zeros(0, np.bool_)]
        episode_of = [np.zeros(0, np.int_)]
    return Transitions(
        np.concatenate(states).astype(np.float64),
        np.concatenate(rewards),
        np.concatenate(next_states).astype(np.float64),
        np.concatenate(terminated),
        np.concatenate(truncated),
        np.concatenate(episode_of),
    )


def _observation_space(dataset: MinariDataset) -> spaces.Space[Any]:
    """The space of a dataset's observations, with the keys of a Dict in the order of the environment's own.

    Minari writes them in that order and sorts them when it reads: the states would be other vectors than the
    environment's, in silence.
    """
    metadata = json.loads((Path(dataset.storage.data_path) / "metadata.json").read_text())
    written = metadata.get("observation_space")  # an old dataset names an environment instead
    return dataset.observation_space if written is None else _as_written(dataset.observation_space, json.loads(written))


def _as_written(space: spaces.Space[Any], written: Any) -> spaces.Space[Any]:
    parts = written.get("subspaces")
    if isinstance(space, spaces.Dict) and isinstance(parts, dict) and parts.keys() == space.spaces.keys():
        return spaces.Dict([(key, _as_written(space.spaces[key], part)) for key, part in parts.items()])
    if isinstance(space, spaces.Tuple) and isinstance(parts, list) and len(parts) == len(space.spaces):
        return spaces.Tuple([_as_written(*pair) for pair in zip(space.spaces, parts, strict=True)])
    return space


def _flatten(space: spaces.Space[Any], observations: Any) -> np.ndarray:
    """The observations of an episode, as Minari holds them (one array for each leaf of the space), as rows."""
    if isinstance(space, spaces.Dict):
        # In the order of the space: a file has one of its own.
        return np.concatenate([_flatten(part, observations[key]) for key, part in space.spaces.items()], axis=1)
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, observations, strict=True)
        return np.concatenate([_flatten(part, values) for part, values in parts], axis=1)
    if isinstance(space, spaces.Box):
        return np.asarray(observations).reshape(len(observations), -1)
    return np.stack([np.asarray(spaces.flatten(space, value)) for value in observations])


def context_from_minari(
    dataset: MinariDataset | str,
    n: int | None = None,
    *,
    seed: int | None = None,
    episodes: Iterable[int] | None = None,
    root: str | os.PathLike[str] | None = None,
) -> Context:
    """Fills a context from a Minari dataset, anybody's.

    Args:
        dataset: A `minari.MinariDataset`, or the id of one on this machine, such as `"D4RL/door/human-v2"`.
        n: How many transitions. None: all.
        seed: None takes the first n transitions. A number takes n random ones without replacement, in the order of
            the dataset.
        episodes: Only from these episodes, in this order, see `load_transitions`.
        root: With an id, see `load_dataset`.

    Returns:
        A context of n transitions in float64, oldest first.

    Raises:
        ValueError: Fewer than n transitions, or none at all; values that are not finite; and whatever
            `load_transitions` raises.
        FileNotFoundError: There is no such dataset.
        ImportError: Minari is missing.
    """
    if n is not None and operator.index(n) < 1:
        raise ValueError(f"n must be at least 1 transition; received {n}.")
    if isinstance(dataset, str):
        dataset = load_dataset(dataset, root)
    transitions = load_transitions(dataset, episodes=episodes, n=n if seed is None else None)
    count = len(transitions) if n is None else operator.index(n)
    if len(transitions) < max(count, 1):
        where = "" if episodes is None else " in these episodes"
        raise ValueError(
            f"expected at least {max(count, 1)} transitions; {dataset.id!r} has {len(transitions)}{where}. "
            f"Take a smaller n, or more episodes."
        )
    if seed is None:
        return transitions.context(slice(count))
    rows = np.random.default_rng(seed).choice(len(transitions), count, replace=False)
    return transitions.context(np.sort(rows))


@overload
def contexts(
    dataset: Transitions | MinariDataset | str,
    n: int,
    count: int,
    seed: int,
    query: None = None,
    *,
    within_episode: bool = True,
    root: str | os.PathLike[str] | None = None,
) -> Context: ...


@overload
def contexts(
    dataset: Transitions | MinariDataset | str,
    n: int,
    count: int,
    seed: int,
    query: int,
    *,
    within_episode: bool = True,
    root: str | os.PathLike[str] | None = None,
) -> tuple[Context, Context]: ...


def contexts(
    dataset: Transitions | MinariDataset | str,
    n: int,
    count: int,
    seed: int,
    query: int | None = None,
    *,
    within_episode: bool = True,
    root: str | os.PathLike[str] | None = None,
) -> Context | tuple[Context, Context]:
    """Draws a batch of contexts, and queries beside them, at random from a dataset.

    Within a sample every transition is another one, and samples share none as long as there are enough: the
    transitions are shuffled and dealt out, and shuffled again when they run out.

    Args:
        dataset: `Transitions` (read once, drawn from often), a `minari.MinariDataset`, or an id for `load_dataset`.
        n: Transitions a context.
        count: How many contexts.
        seed: Determines the draw.
        query: So many further transitions a context, out of the same episode with `within_episode`, for states to ask
            the values of. None: only contexts.
        within_episode: Each context is of one episode, hence of one goal, and the episodes take turns in random order;
            those shorter than `n + query` are left out. False draws from all episodes alike.
        root: With an id, see `load_dataset`.

    Returns:
        The contexts, one `Context` of batch shape (count,) and n transitions. With `query`, also the queries, likewise
        with `query` transitions. Transitions of a sample are in the order of the dataset, and not consecutive.

    Raises:
        ValueError: `n`, `count` or `query` below 1, or too few transitions.

    Example:
        >>> states = np.arange(8.0)[:, None]
        >>> ends = np.array([False, False, False, True] * 2)
        >>> data = Transitions(states, np.ones(8), states + 1, ends, np.zeros(8, bool), np.repeat([0, 1], 4))
        >>> contexts(data, n=3, count=5, seed=0)
        Context(n=3, d=1, batch_shape=(5,))
        >>> context, queries = contexts(data, n=3, count=5, seed=0, query=1)
        >>> queries
        Context(n=1, d=1, batch_shape=(5,))
    """
    for name, value in (("n", n), ("count", count), ("query", 1 if query is None else query)):
        if operator.index(value) < 1:
            raise ValueError(f"{name} must be at least 1; received {value}.")
    data = dataset if isinstance(dataset, Transitions) else load_transitions(dataset, root=root)
    size = n + (query or 0)
    rng = np.random.default_rng(seed)
    if within_episode:
        labels, lengths = np.unique(data.episode, return_counts=True)
        by_episode = np.argsort(data.episode, kind="stable")  # rows of an episode side by side, in their order
        first = np.cumsum(lengths) - lengths
        eligible = np.flatnonzero(lengths >= size)
        if not len(eligible):
            raise ValueError(
                f"expected an episode of at least {size} transitions (n {n}, query {query or 0}); the longest of "
                f"{len(labels)} has {lengths.max(initial=0)}. Take fewer, or within_episode=False."
            )
        turns = _deal(rng, len(eligible), 1, count)[:, 0]
        rows = np.empty((count, size), np.intp)
        for turn, e in enumerate(eligible):
            mine = np.flatnonzero(turns == turn)
            if len(mine):
                rows[mine] = by_episode[first[e] + _deal(rng, int(lengths[e]), size, len(mine))]
    else:
        if len(data) < size:
            raise ValueError(
                f"expected at least {size} transitions (n {n}, query {query or 0}); the dataset has {len(data)}."
            )
        rows = _deal(rng, len(data), size, count)
    context = data.context(np.sort(rows[:, :n], axis=1))
    return context if query is None else (context, data.context(np.sort(rows[:, n:], axis=1)))


def _deal(rng: np.random.Generator, n_items: int, size: int, count: int) -> npt.NDArray[np.intp]:
    """Deals hands out of 0 ... n_items - 1, shuffled anew whenever what is left makes no hand: shape (count, size)."""
    hands = n_items // size
    rounds = -(-count // hands)
    decks = rng.permuted(np.tile(np.arange(n_items, dtype=np.intp), (rounds, 1)), axis=1)
    return decks[:, : hands * size].reshape(-1, size)[:count]

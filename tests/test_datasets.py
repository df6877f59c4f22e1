"""Recorded Minari datasets: replay, noise, cache, whole files, damage; contexts out of anybody's Minari dataset."""

import doctest
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
import tyro
from icrl_gym.wrappers import RollingContext
from icrl_gym.wrappers.flattening import flattener

import icrl_gym.datasets
from icrl_gym import Context
from icrl_gym.datasets import (
    NOISE_LEVELS,
    CollectConfig,
    Transitions,
    collect,
    context_from_minari,
    contexts,
    dataset_id,
    load_dataset,
    load_transitions,
)
from icrl_gym.metaworld import PAPER_DOMAINS, TASKS, ScriptedExpert, make_env
from icrl_gym.runs import folder_lock

minari = pytest.importorskip("minari")
h5py = pytest.importorskip("h5py")

ARRAYS = ("observations", "actions", "rewards", "terminations", "truncations")
SMALL = dict(tasks=("reach", "drawer-close"), noise=("low", "high"), episodes=2, steps=20, jobs=1)
REACH_LOW, REACH_HIGH = "icrl_gym/reach-v3/low-v0", "icrl_gym/reach-v3/high-v0"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Real recordings, made once: the folder and the ids. Nobody writes into it."""
    root = tmp_path_factory.mktemp("recorded")
    return root, collect(CollectConfig(**SMALL, root=str(root)))


def fake_record(settings):
    """What Meta-World would give, faster: random numbers that the settings determine."""
    rng = np.random.default_rng([settings["seed"], len(settings["task"]), int(10 * settings["noise"])])
    n = settings["steps"]
    episodes = [
        icrl_gym.datasets._Episode(
            seed=index,
            noise_seed=index,
            goal=index,
            observations=rng.normal(size=(n + 1, 39)).astype(np.float32),
            actions=rng.uniform(-1, 1, (n, 4)).astype(np.float32),
            rewards=rng.normal(size=n),
            terminations=np.zeros(n, bool),
            truncations=np.arange(n) == n - 1,
            success=np.zeros(n + 1, bool),
        )
        for index in range(settings["episodes"])
    ]
    states, actions = gym.spaces.Box(-np.inf, np.inf, (39,)), gym.spaces.Box(-1, 1, (4,))
    return icrl_gym.datasets._Recording(episodes, states, actions, 0.0)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Settings of fake recordings into a folder of this test."""
    monkeypatch.setattr(icrl_gym.datasets, "_record", fake_record)
    return CollectConfig(**{**SMALL, "noise": ("low",)}, root=str(tmp_path))


def sums(root, ids):
    return [load_dataset(name, root).storage.metadata["icrl_gym"]["sha256"] for name in ids]


def hidden(root):
    return sorted(path.name for path in root.rglob(".*") if path.name != ".lock")


# Recording


def test_ids_and_levels():
    assert dataset_id("Reach", "low") == REACH_LOW
    assert NOISE_LEVELS == {"low": 0.1, "medium": 0.5, "high": 1.0}
    with pytest.raises(ValueError, match=r"unknown noise level 'loud'; expected one of 'low', 'medium', 'high'"):
        dataset_id("reach", "loud")
    with pytest.raises(ValueError, match="did you mean 'reach-v3'"):
        dataset_id("reech", "low")


def test_every_task_can_be_asked_for():
    wanted = icrl_gym.datasets._settings(CollectConfig(tasks=("all", "reach"), noise=("high", "low")))
    assert len(wanted) == 2 * len(TASKS)
    assert list(wanted)[:2] == [dataset_id(TASKS[0], "high"), dataset_id(TASKS[0], "low")]


def test_recordings_replay_by_hand_bit_for_bit(recorded):
    root, ids = recorded
    for name in ids:
        dataset = load_dataset(name, root)
        settings = dataset.storage.metadata["icrl_gym"]["settings"]
        env = make_env(settings["task"], seed=0, max_episode_steps=20)
        metadata = list(dataset.storage.get_episode_metadata(range(2)))
        # The last one first: an episode does not depend on those before it.
        for index in (1, 0):
            episode, about = dataset[index], metadata[index]
            expert = ScriptedExpert(settings["task"], noise=settings["noise"], seed=int(about["noise_seed"]))
            observation, _ = env.reset(seed=about["seed"])
            assert env.get_wrapper_attr("goal_index") == about["goal"]
            np.testing.assert_array_equal(episode.observations[0], observation)
            for t in range(20):
                action = expert(observation)
                observation, reward, terminated, truncated, info = env.step(action)
                np.testing.assert_array_equal(episode.actions[t], action)
                np.testing.assert_array_equal(episode.observations[t + 1], observation)
                assert episode.rewards[t] == reward
                assert (episode.terminations[t], episode.truncations[t]) == (terminated, truncated)
                assert episode.infos["success"][t + 1] == info["is_success"]
            assert truncated
        env.close()


def test_types_shapes_and_spaces(recorded):
    root, ids = recorded
    assert ids == [dataset_id(task, level) for task in ("reach", "drawer-close") for level in ("low", "high")]
    for name in ids:
        dataset = load_dataset(name, root)
        assert (dataset.total_episodes, dataset.total_steps) == (2, 40)
        for episode in dataset.iterate_episodes():
            assert [(getattr(episode, a).shape, getattr(episode, a).dtype.name) for a in ARRAYS] == [
                ((21, 39), "float32"), ((20, 4), "float32"), ((20,), "float64"), ((20,), "bool"), ((20,), "bool")
            ]  # fmt: skip
            assert all(observation in dataset.observation_space for observation in episode.observations)
            assert all(action in dataset.action_space for action in episode.actions)


def test_episodes_have_goals_of_their_own_and_levels_have_the_same_ones(recorded):
    root, ids = recorded
    goals = {}
    for name in ids:
        dataset = load_dataset(name, root)
        firsts = [episode.observations[0] for episode in dataset.iterate_episodes()]
        assert not np.array_equal(firsts[0], firsts[1])
        metadata = list(dataset.storage.get_episode_metadata(range(2)))
        assert metadata[0]["goal"] != metadata[1]["goal"]
        goals[name] = [(about["seed"], about["goal"]) for about in metadata]
    assert goals[REACH_LOW] == goals[REACH_HIGH]
    assert goals[REACH_LOW] != goals[dataset_id("drawer-close", "low")]


def test_goals_come_round_only_after_all_of_them(monkeypatch):
    import metaworld

    monkeypatch.setattr(metaworld, "_N_GOALS", 4)
    (settings,) = icrl_gym.datasets._settings(CollectConfig(tasks=("reach",), noise=("low",), episodes=9)).values()
    goals = [episode.goal for episode in icrl_gym.datasets._record({**settings, "steps": 1}).episodes]
    assert sorted(goals[:4]) == sorted(goals[4:8]) == [0, 1, 2, 3]


def test_noise_has_its_standard_deviation_and_is_clipped(recorded):
    root, _ = recorded
    # The script of reach leaves the gripper alone, so its effort is the noise, clipped.
    low, high = (
        np.concatenate([episode.actions[:, 3] for episode in load_dataset(name, root).iterate_episodes()])
        for name in (REACH_LOW, REACH_HIGH)
    )
    assert abs(low.mean()) < 3 * 0.1 / np.sqrt(40)
    assert 0.07 < low.std() < 0.13
    assert not np.isin(low, (-1, 1)).any()
    # P(|e| > 1) = 0.317 for e standard normal
    assert 0.15 < np.isin(high, (-1, 1)).mean() < 0.5
    assert abs(np.corrcoef(low, high)[0, 1]) < 0.5, "levels have noise of their own"
    assert abs(np.corrcoef(low[:20], low[20:])[0, 1]) < 0.6, "episodes have noise of their own"
    for name in (REACH_LOW, REACH_HIGH):
        actions = np.concatenate([episode.actions for episode in load_dataset(name, root).iterate_episodes()])
        assert np.abs(actions).max() == 1.0, "the script asks for more than 1"


def test_the_number_of_jobs_changes_nothing(recorded, tmp_path):
    root, ids = recorded
    two = collect(CollectConfig(**{**SMALL, "tasks": ("reach",), "jobs": 2}, root=str(tmp_path)))
    assert two == ids[:2]
    assert sums(tmp_path, two) == sums(root, two)


def test_another_seed_gives_other_numbers(recorded, monkeypatch):
    import metaworld

    monkeypatch.setattr(metaworld, "_N_GOALS", 4)
    root, ids = recorded
    settings = load_dataset(ids[0], root).storage.metadata["icrl_gym"]["settings"]
    other = icrl_gym.datasets._record({**settings, "seed": 1, "steps": 3}).episodes
    first = load_dataset(ids[0], root)[0]
    assert not np.array_equal(other[0].observations, first.observations[:4])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (dict(episodes=0), "--episodes must be at least 1; received 0"),
        (dict(steps=0), "--steps must be in 1 ... 500, Meta-World's own limit; received 0"),
        (dict(steps=501), "received 501"),
        (dict(jobs=0), "--jobs must be at least 1"),
        (dict(seed=-1), r"--seed must be in 0 ... 2\*\*32 - 1; received -1"),
        (dict(tasks=()), "--tasks must name at least one"),
        (dict(noise=()), "--noise must name at least one level of low, medium, high"),
        (dict(tasks=("buton-press",)), "did you mean 'button-press-v3'"),
        (dict(noise=("loud",)), "unknown noise level 'loud'"),
    ],
)
def test_settings_that_cannot_work_are_refused(fake, tmp_path, changed, text):
    for name, value in changed.items():
        setattr(fake, name, value)
    with pytest.raises(ValueError, match=text):
        collect(fake)
    assert not list(tmp_path.iterdir())


def test_the_command_line_reads_the_settings():
    config = tyro.cli(CollectConfig, args="--tasks reach bin-picking --noise high --episodes 3 --force".split())
    assert config == CollectConfig(tasks=("reach", "bin-picking"), noise=("high",), episodes=3, force=True)
    assert CollectConfig().tasks == PAPER_DOMAINS


# Cache


def test_what_is_there_is_not_written_again(fake, tmp_path, capsys, monkeypatch):
    ids = collect(fake)
    assert "2 datasets, 0 there already, 2 to record" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(icrl_gym.datasets, "_record", None)
        assert collect(fake) == ids
    assert capsys.readouterr().out == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    fake.noise = ("low", "medium")
    assert len(collect(fake)) == 4
    assert "4 datasets, 2 there already, 2 to record" in capsys.readouterr().out


def test_other_settings_are_refused_and_force_replaces(fake, tmp_path):
    ids = collect(fake)
    before = sums(tmp_path, ids)
    fake.seed, fake.episodes, fake.noise = 1, 3, ("low", "high")
    with pytest.raises(
        ValueError, match=r"low-v0' is there with episodes 2 instead of 3, seed 0 instead of 1\. Give --force"
    ):
        collect(fake)
    assert sums(tmp_path, ids) == before
    assert not (tmp_path / REACH_HIGH).exists(), "refused before anything was recorded"
    fake.force = True
    assert set(collect(fake)) > set(ids)
    assert not set(sums(tmp_path, ids)) & set(before)
    assert load_dataset(ids[0], tmp_path).total_episodes == 3
    assert hidden(tmp_path) == []


def test_somebody_elses_dataset_of_that_name_is_not_taken_for_ours(fake, tmp_path):
    collect(fake)
    file = tmp_path / REACH_LOW / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    del metadata["icrl_gym"]
    file.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=r"there with format None instead of 1, task None"):
        collect(fake)


# Whole or not at all


@pytest.mark.parametrize("force", [False, True])
def test_an_error_at_the_rename_leaves_nothing_behind(fake, tmp_path, monkeypatch, force):
    fake.force = force
    if force:
        ids = collect(fake)
        before = sums(tmp_path, ids)
        fake.seed = 1
    replace = os.replace

    def fails(source, target):
        if ".partial_" in str(source) and str(target).endswith("-v0"):
            raise OSError("disk full")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="disk full"):
            collect(fake)
    assert hidden(tmp_path) == []
    if force:
        assert sums(tmp_path, ids) == before, "the old ones are back"
    else:
        assert not (tmp_path / REACH_LOW).exists()
    assert len(sums(tmp_path, collect(fake))) == 2


def test_a_kill_in_the_middle_leaves_whole_datasets_only(fake, tmp_path):
    script = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        import icrl_gym.datasets
        from minari.dataset._storages.hdf5_storage import HDF5Storage
        from test_datasets import SMALL, fake_record
        icrl_gym.datasets._record = fake_record
        update = HDF5Storage.update_episode_metadata
        def die(self, metadatas, indices=None):
            if "drawer-close" in str(self.data_path):
                os.kill(os.getpid(), signal.SIGKILL)
            update(self, metadatas, indices)
        HDF5Storage.update_episode_metadata = die
        icrl_gym.datasets.collect(icrl_gym.datasets.CollectConfig(**{**SMALL, "noise": ("low",)}, root=sys.argv[1]))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), os.path.dirname(__file__)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert hidden(tmp_path) == [".partial_low-v0"]
    assert not (tmp_path / dataset_id("drawer-close", "low")).exists()
    whole = load_dataset(REACH_LOW, tmp_path)
    assert whole.total_steps == 40
    before = (tmp_path / REACH_LOW / "data" / "main_data.hdf5").stat().st_mtime_ns
    ids = collect(fake)
    assert (tmp_path / REACH_LOW / "data" / "main_data.hdf5").stat().st_mtime_ns == before
    assert hidden(tmp_path) == []
    assert len(sums(tmp_path, ids)) == 2


def test_a_kill_between_the_two_renames_gives_the_old_one_back(fake, tmp_path):
    ids = collect(fake)
    before = sums(tmp_path, ids)
    (tmp_path / REACH_LOW).rename(tmp_path / "icrl_gym/reach-v3/.replaced_low-v0")
    assert sums(tmp_path, collect(fake)) == before
    assert hidden(tmp_path) == []


def test_two_at_once_take_turns(fake, tmp_path, capsys):
    thread = threading.Thread(target=collect, args=(fake,))
    with folder_lock(tmp_path / "icrl_gym"):
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        assert not (tmp_path / REACH_LOW).exists()
    thread.join(20)
    assert "another process records into" in capsys.readouterr().out
    assert load_dataset(REACH_LOW, tmp_path).total_steps == 40


def test_a_failure_lets_the_others_finish(fake, tmp_path, monkeypatch):
    def fails_for_reach(settings):
        if settings["task"] == "reach-v3":
            raise RuntimeError("no simulator")
        return fake_record(settings)

    monkeypatch.setattr(icrl_gym.datasets, "_record", fails_for_reach)
    with pytest.raises(RuntimeError, match="reach-v3/low-v0 failed: no simulator; the same command tries it again"):
        collect(fake)
    assert load_dataset(dataset_id("drawer-close", "low"), tmp_path).total_steps == 40


# Damage


def change_a_reward(data):
    with h5py.File(data / "main_data.hdf5", "r+") as file:
        file["episode_1/rewards"][3] += 1e-9


def change_an_observation(data):
    with h5py.File(data / "main_data.hdf5", "r+") as file:
        file["episode_0/observations"][0, 0] += 1


def truncate(data):
    file = data / "main_data.hdf5"
    file.write_bytes(file.read_bytes()[:5000])


def remove(data):
    (data / "main_data.hdf5").unlink()


def truncate_metadata(data):
    file = data / "metadata.json"
    file.write_text(file.read_text()[:100])


@pytest.mark.parametrize("damage", [change_a_reward, change_an_observation, truncate, remove, truncate_metadata])
def test_damage_is_detected_and_named(fake, tmp_path, damage):
    collect(fake)
    data = tmp_path / REACH_LOW / "data"
    load_dataset(REACH_LOW, tmp_path)
    damage(data)
    file = "metadata.json" if damage is truncate_metadata else "main_data.hdf5"
    for use in (lambda: load_dataset(REACH_LOW, tmp_path), lambda: collect(fake)):
        with pytest.raises(ValueError, match=rf"reach-v3/low-v0/data/{file}' is damaged: .*--force"):
            use()
    fake.force = True
    collect(fake)
    load_dataset(REACH_LOW, tmp_path)


def test_a_dataset_of_a_newer_minari_is_not_called_damaged(fake, tmp_path):
    collect(fake)
    file = tmp_path / REACH_LOW / "data" / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "minari_version": "99.0.0"}))
    with pytest.raises(ValueError, match="does not support the dataset generated by Minari 99"):
        load_dataset(REACH_LOW, tmp_path)


def test_a_dataset_that_is_not_there(tmp_path):
    for use in (load_dataset, lambda name, root: context_from_minari(name, root=root)):
        with pytest.raises(
            FileNotFoundError,
            match=r"no Minari dataset 'D4RL/door/human-v9' in .*icrl-gym collect.*minari download D4RL",
        ):
            use("D4RL/door/human-v9", tmp_path)


def test_without_minari_the_extra_is_named(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    for use in (lambda: collect(fake), lambda: load_dataset(REACH_LOW), lambda: context_from_minari(REACH_LOW)):
        with pytest.raises(ImportError, match=r'need minari; pip install "icrl-gym\[data\]" brings it'):
            use()


# Other tools


def test_minari_itself_reads_and_lists_them(recorded, monkeypatch):
    root, ids = recorded
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(minari.list_local_datasets()) == sorted(ids)
        dataset = minari.load_dataset(REACH_HIGH)
    assert dataset.id == REACH_HIGH
    assert dataset.spec.namespace == "icrl_gym/reach-v3"
    assert [len(episode) for episode in dataset.iterate_episodes()] == [20, 20]
    assert len(dataset.filter_episodes(lambda episode: episode.truncations[-1])) == 2
    assert {"icrl_gym", "icrl_gym/reach-v3"} <= set(minari.namespace.list_local_namespaces())
    metadata = dataset.storage.metadata
    assert metadata["icrl_gym"]["versions"].keys() >= {"metaworld", "numpy", "mujoco"}
    assert metadata["requirements"][0].startswith("metaworld==")
    # Without a root, it is Minari's own folder.
    assert load_dataset(REACH_HIGH).id == REACH_HIGH
    assert len(context_from_minari(REACH_HIGH)) == 40
    assert collect(CollectConfig(**SMALL)) == ids


def test_a_recorded_dataset_becomes_the_context_that_a_wrapper_records(recorded):
    root, _ = recorded
    dataset = load_dataset(REACH_LOW, root)
    env = make_env("reach", seed=0, max_episode_steps=20, context_length=100)
    for about, episode in zip(dataset.storage.get_episode_metadata(range(2)), dataset, strict=True):
        env.reset(seed=about["seed"])
        for action in episode.actions:
            env.step(action)
    assert context_from_minari(REACH_LOW, root=root) == env.get_wrapper_attr("context")
    env.close()


# Anybody's datasets


SPACES = {
    "box": gym.spaces.Box(-1, 1, (2, 3), np.float64),
    "scalar": gym.spaces.Box(-1, 1, (), np.float32),
    "integers": gym.spaces.Box(-9, 9, (4,), np.int64),
    "discrete": gym.spaces.Discrete(5, start=2),
    "multi": gym.spaces.MultiDiscrete([3, 2]),
    "binary": gym.spaces.MultiBinary(4),
    "dict": gym.spaces.Dict(z=gym.spaces.Box(-1, 1, (2,), np.float32), a=gym.spaces.Discrete(3)),
    "tuple": gym.spaces.Tuple(
        [
            gym.spaces.Discrete(2),
            gym.spaces.Dict(x=gym.spaces.Box(-1, 1, (1,), np.float64), b=gym.spaces.MultiBinary(2)),
        ]
    ),
}
# Steps, terminated at the end, truncated at the end.
ENDS = [(3, True, False), (4, False, True), (2, False, False), (1, True, True)]


def batched(space, observations):
    """As Minari wants the observations of an episode: one array a leaf."""
    if isinstance(space, gym.spaces.Dict):
        return {key: batched(part, [o[key] for o in observations]) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(batched(part, [o[i] for o in observations]) for i, part in enumerate(space.spaces))
    return np.array(observations)


def make(root, monkeypatch, space, ends=ENDS, name="someone/test-v0", data_format="hdf5", extra=1, reward=None):
    """A Minari dataset made as its documentation says, and its observations, rewards and flags an episode."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    space.seed(0)
    rng = np.random.default_rng(0)
    episodes, buffers = [], []
    for length, terminated, truncated in ends:
        observations = [space.sample() for _ in range(length + extra)]
        rewards = rng.normal(size=length).astype(np.float32) if reward is None else np.full(length, reward)
        last = np.arange(length) == length - 1
        episodes.append((observations, rewards, last & terminated, last & truncated))
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                observations=batched(space, observations),
                actions=np.zeros(length, np.int64),
                rewards=rewards,
                terminations=last & terminated,
                truncations=last & truncated,
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Minari asks for an author and a permalink
        dataset = minari.create_dataset_from_buffers(
            name, buffers, observation_space=space, action_space=gym.spaces.Discrete(2), data_format=data_format
        )
    return dataset, episodes


def looped(space, episodes):
    """The transitions, one after the other."""
    flatten = flattener(space)[0]
    rows = []
    for observations, rewards, terminations, truncations in episodes:
        for t in range(len(rewards)):
            end = t == len(rewards) - 1
            cut = truncations[t] or (end and not terminations[t])
            rows.append((flatten(observations[t]), rewards[t], flatten(observations[t + 1]), terminations[t], cut))
    states, rewards, next_states, terminated, truncated = zip(*rows, strict=True)
    as_float = [np.array(x, np.float64) for x in (states, rewards, next_states)]
    return Context(*as_float, np.array(terminated, bool), np.array(truncated, bool))


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
@pytest.mark.parametrize("kind", SPACES)
def test_a_dataset_becomes_the_context_of_a_loop(tmp_path, monkeypatch, kind, data_format):
    if data_format == "arrow":
        pytest.importorskip("pyarrow")
    space = SPACES[kind]
    dataset, episodes = make(tmp_path, monkeypatch, space, data_format=data_format)
    expected = looped(space, episodes)
    context = context_from_minari(dataset)
    assert context == expected
    assert context.states.dtype == context.rewards.dtype == context.next_states.dtype
    assert str(context.states.dtype) == "torch.float64"
    assert context_from_minari("someone/test-v0") == expected
    for n in (1, 3, 5, 10):
        assert context_from_minari(dataset, n) == expected[:n]
    assert load_transitions(dataset).episode.tolist() == [0] * 3 + [1] * 4 + [2] * 2 + [3]


def test_ends_of_episodes(tmp_path, monkeypatch):
    dataset, _ = make(tmp_path, monkeypatch, SPACES["dict"])
    context = context_from_minari(dataset)
    assert context.terminated.tolist() == [False, False, True] + [False] * 4 + [False] * 2 + [True]
    # The third episode stops without a word; nothing follows its last transition all the same.
    assert context.truncated.tolist() == [False] * 3 + [False, False, False, True] + [False, True] + [True]


def test_a_random_choice_is_without_replacement_and_by_its_seed(tmp_path, monkeypatch):
    dataset, episodes = make(tmp_path, monkeypatch, SPACES["box"])
    everything = looped(SPACES["box"], episodes)
    assert context_from_minari(dataset, seed=0) == everything, "all of them, in their order"
    seen = set()
    for seed in range(20):
        context = context_from_minari(dataset, 4, seed=seed)
        assert context == context_from_minari(dataset, 4, seed=seed)
        rows = [int((everything.rewards == reward).nonzero().item()) for reward in context.rewards]
        assert rows == sorted(set(rows))
        assert context == everything[rows]
        seen.update(rows)
    assert seen == set(range(10))


def test_only_some_episodes(tmp_path, monkeypatch):
    dataset, episodes = make(tmp_path, monkeypatch, SPACES["dict"])
    expected = looped(SPACES["dict"], [episodes[2], episodes[0]])
    assert context_from_minari(dataset, episodes=[2, 0]) == expected
    assert context_from_minari(dataset, 4, episodes=iter([2, 0])) == expected[:4]
    filtered = dataset.filter_episodes(lambda episode: len(episode) >= 3)
    assert context_from_minari(filtered) == looped(SPACES["dict"], episodes[:2])
    for some, there in ((dataset, "0, 1, 2, 3"), (filtered, "0, 1")):
        with pytest.raises(ValueError, match=rf"'someone/test-v0' has no episode 7; its . episodes are \[{there}\]"):
            context_from_minari(some, episodes=[0, 7])
    with pytest.raises(ValueError, match=r"each episode once, please; received \[1, 1\]"):
        context_from_minari(dataset, episodes=[1, 1])


def test_too_few_transitions(tmp_path, monkeypatch):
    dataset, _ = make(tmp_path, monkeypatch, SPACES["box"])
    for seed in (None, 0):
        with pytest.raises(
            ValueError, match=r"expected at least 11 transitions; 'someone/test-v0' has 10\. Take a smaller n"
        ):
            context_from_minari(dataset, 11, seed=seed)
        with pytest.raises(ValueError, match=r"expected at least 4 transitions; .* has 3 in these episodes"):
            context_from_minari(dataset, 4, seed=seed, episodes=[0])
        with pytest.raises(ValueError, match=r"expected at least 1 transitions; .* has 0 in these episodes"):
            context_from_minari(dataset, seed=seed, episodes=[])
        with pytest.raises(ValueError, match="n must be at least 1 transition; received 0"):
            context_from_minari(dataset, 0, seed=seed)


def test_observations_that_are_no_states(tmp_path, monkeypatch):
    image = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8)
    for name, space in {"image": image, "inside": gym.spaces.Dict(camera=image, hand=SPACES["box"])}.items():
        dataset, _ = make(tmp_path, monkeypatch, space, name=f"{name}-v0")
        with pytest.raises(ValueError, match=rf"the observations of '{name}-v0' make no states of a context: .*encode"):
            context_from_minari(dataset)


def test_values_that_are_not_finite(tmp_path, monkeypatch):
    dataset, _ = make(tmp_path, monkeypatch, SPACES["box"], reward=np.nan)
    with pytest.raises(ValueError, match="rewards must be finite; 10 of 10"):
        context_from_minari(dataset)


def test_an_episode_without_its_last_observation(tmp_path, monkeypatch):
    dataset, _ = make(tmp_path, monkeypatch, SPACES["box"], extra=0)
    with pytest.raises(
        ValueError, match="episode 0 of 'someone/test-v0' has 3 observations and 3 rewards; expected one"
    ):
        context_from_minari(dataset)


def test_the_states_are_those_of_the_wrapper(tmp_path, monkeypatch):
    class Playback(gym.Env):
        observation_space, action_space = SPACES["dict"], gym.spaces.Discrete(2)

        def __init__(self, episode):
            self.observations, self.rewards, self.terminations, self.truncations = episode

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return self.observations[0], {}

        def step(self, action):
            self.t += 1
            flags = bool(self.terminations[self.t - 1]), bool(self.truncations[self.t - 1])
            return self.observations[self.t], float(self.rewards[self.t - 1]), *flags, {}

    # The keys of this space are not sorted: Minari sorts them when it reads them from the file.
    made, episodes = make(tmp_path, monkeypatch, SPACES["dict"])
    read = minari.load_dataset(made.id)
    assert list(made.observation_space) == ["z", "a"] != list(read.observation_space)
    env = RollingContext(Playback(episodes[1]), length=10)
    env.reset()
    for _ in range(4):
        env.step(0)
    assert context_from_minari(made, episodes=[1]) == context_from_minari(read, episodes=[1]) == env.context


# Batches of contexts


def numbered(lengths):
    """Transitions whose state is their own number."""
    n = sum(lengths)
    ends = np.zeros(n, bool)
    ends[np.cumsum(lengths) - 1] = True
    states = np.arange(n, dtype=np.float64)[:, None]
    return Transitions(
        states, states[:, 0] * 10, states + 0.5, ends, ~ends, np.repeat(np.arange(len(lengths)), lengths)
    )


def rows_of(context, data):
    rows = context.states[..., 0].long()
    assert context == data.context(rows.numpy()), "all fields of a transition stay together"
    return rows.numpy()


@pytest.mark.parametrize("within_episode", [True, False])
def test_samples_share_nothing_while_there_is_enough(within_episode):
    data = numbered([10, 10, 10])
    context, queries = contexts(data, n=3, count=6, seed=0, query=2, within_episode=within_episode)
    assert (context.batch_shape, len(context), queries.batch_shape, len(queries)) == ((6,), 3, (6,), 2)
    rows, asked = rows_of(context, data), rows_of(queries, data)
    assert sorted(np.concatenate([rows.ravel(), asked.ravel()])) == list(range(30))
    assert (np.diff(rows, axis=1) > 0).all(), "in the order of the dataset"
    of = np.concatenate([data.episode[rows], data.episode[asked]], axis=1)
    assert ((of == of[:, :1]).all(1)).all() == within_episode


@pytest.mark.parametrize("within_episode", [True, False])
def test_more_samples_than_there_is_enough_for(within_episode):
    data = numbered([7, 3, 6, 6])
    context, queries = contexts(data, n=4, count=101, seed=0, query=1, within_episode=within_episode)
    together = np.concatenate([rows_of(context, data), rows_of(queries, data)], axis=1)
    assert all(len(set(rows)) == 5 for rows in together)
    if within_episode:
        of = data.episode[together]
        assert (of == of[:, :1]).all()
        counts = np.bincount(of[:, 0], minlength=4)
        assert counts[1] == 0, "too short"
        assert sorted(counts[[0, 2, 3]]) == [33, 34, 34], "episodes take turns"
    uses = np.bincount(together.ravel(), minlength=22)
    assert (uses[data.episode != 1] > 0).all()


def test_samples_are_by_their_seed_and_of_rows_in_any_order():
    data = numbered([10, 10])
    assert contexts(data, 3, 4, 0) == contexts(data, 3, 4, 0)
    assert contexts(data, 3, 4, 0) != contexts(data, 3, 4, 1)
    order = np.random.default_rng(0).permutation(20)
    names = ("states", "rewards", "next_states", "terminated", "truncated", "episode")
    shuffled = Transitions(*(getattr(data, name)[order] for name in names))
    states = contexts(shuffled, 3, 50, 0).states[..., 0].long().numpy()
    of = data.episode[states]
    assert (of == of[:, :1]).all()


def test_samples_of_a_recorded_dataset(recorded):
    root, _ = recorded
    data = load_transitions(REACH_LOW, root=root)
    assert len(data) == 40
    batch = contexts(REACH_LOW, n=16, count=3, seed=5, root=root)
    assert batch == contexts(data, n=16, count=3, seed=5)
    assert batch == contexts(load_dataset(REACH_LOW, root), n=16, count=3, seed=5)
    assert repr(batch) == "Context(n=16, d=39, batch_shape=(3,))"
    # The goal is the end of a state: one goal a context.
    assert (batch.states[:, :, 36:] == batch.states[:, :1, 36:]).all()


def test_samples_that_cannot_be_drawn():
    data = numbered([4, 6])
    with pytest.raises(
        ValueError, match=r"an episode of at least 7 transitions \(n 5, query 2\); the longest of 2 has 6"
    ):
        contexts(data, 5, 1, 0, query=2)
    with pytest.raises(ValueError, match=r"at least 11 transitions \(n 11, query 0\); the dataset has 10"):
        contexts(data, 11, 1, 0, within_episode=False)
    for wrong in (dict(n=0), dict(count=0), dict(query=0)):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1; received 0"):
            contexts(data, **{**dict(n=1, count=1, seed=0), **wrong})


def test_a_context_does_not_share_memory_with_the_arrays():
    data = numbered([4])
    context = data.context()
    data.states[0] = 99
    assert context.states[0, 0] == 0


def test_drawing_is_fast():
    data = numbered([500] * 20)
    started = time.perf_counter()
    contexts(data, n=64, count=1000, seed=0, query=1)
    assert time.perf_counter() - started < 2


def test_examples():
    results = doctest.testmod(icrl_gym.datasets)
    assert results.attempted > 5
    assert results.failed == 0


def test_a_relative_root_is_a_folder_of_this_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (name,) = collect(CollectConfig(("drawer-close",), ("low",), episodes=1, steps=3, root="data", jobs=1))
    assert (tmp_path / "data" / name).is_dir() and len(load_transitions(name, root="data")) == 3

"""Meta-World environments: contracts, seeds, time limits, several tasks, error texts."""

import doctest
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import cloudpickle
import gymnasium as gym
import metaworld
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

import icrl_gym.metaworld
from icrl_gym.metaworld import (
    PAPER_DOMAINS,
    TASKS,
    MetaWorldEnv,
    ScriptedExpert,
    TaskOneHot,
    make_env,
    make_vec_env,
    resolve_task,
)

THREE = ["reach", "drawer-close", "button-press"]


@pytest.fixture
def few_goals(monkeypatch):
    # Meta-World finds its 50 goals a task by 100 resets, most of the time that making an environment takes.
    monkeypatch.setattr(metaworld, "_N_GOALS", 5)


def unchecked(function):
    # What a user without jaxtyping has: the test run's shape checker would refuse a wrong type before our message does.
    return inspect.unwrap(function)


def roll(env, n_steps=30, resets=2, seed=None):
    """Observations, rewards and goals of a few episodes under fixed actions."""
    rng = np.random.default_rng(0)
    observations, rewards, goals = [], [], []
    for episode in range(resets):
        observation, _ = env.reset(seed=seed if episode == 0 else None)
        observations.append(observation)
        goals.append(env.get_wrapper_attr("goal_index"))
        for _ in range(n_steps):
            observation, reward, *_ = env.step(rng.uniform(-1, 1, 4).astype(np.float32))
            observations.append(observation)
            rewards.append(reward)
    return np.array(observations), np.array(rewards), goals


# Names


def test_there_are_fifty_tasks_and_the_paper_uses_five_of_them():
    assert len(TASKS) == len(set(TASKS)) == 50
    assert set(PAPER_DOMAINS) < set(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_every_spelling_finds_its_task(task):
    stem = task.removesuffix("-v3")
    for name in (task, stem, task.upper(), stem.replace("-", "_"), stem.title().replace("-", " "), f" {stem}_V3 "):
        assert resolve_task(name) == task


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("buton-press", "unknown Meta-World task 'buton-press'; did you mean 'button-press-v3', "),
        ("peg_insertion_side", "unknown Meta-World task 'peg_insertion_side'; did you mean 'peg-insert-side-v3', "),
        ("reach-v2", "unknown Meta-World task 'reach-v2'; did you mean 'reach-v3', "),
        ("qqqq", "unknown Meta-World task 'qqqq'; icrl_gym.metaworld.TASKS lists all fifty"),
        ("", "unknown Meta-World task ''; icrl_gym.metaworld.TASKS lists all fifty"),
    ],
)
def test_an_unknown_task_is_told_its_neighbors(name, text):
    for function in (resolve_task, make_env, make_vec_env, ScriptedExpert):
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            function(name)
        assert "\n" not in str(caught.value)


# The contract of one environment


def test_all_fifty_tasks_reset_and_step_inside_their_space(few_goals):
    for task in TASKS:
        env = make_env(task, seed=1)
        observation, _ = env.reset()
        after, reward, terminated, truncated, info = env.step(env.action_space.sample())
        for o in (observation, after):
            assert o.dtype == np.float32 and o.shape == (39,) and o in env.observation_space, task
        assert np.array_equal(observation[-3:], after[-3:]), f"{task}: the goal moved within an episode"
        assert type(reward) is float and terminated is False and truncated is False, task
        assert type(info["is_success"]) is bool and "success" in info, task
        env.close()


def test_the_bare_environment_leaves_its_own_space():
    # The reason for the adapter. When this fails, Meta-World has repaired it.
    benchmark = metaworld.MT1("reach-v3", seed=0)
    env = benchmark.train_classes["reach-v3"]()
    env.set_task(benchmark.train_tasks[0])
    observation, _ = env.reset()
    assert observation not in env.observation_space


@pytest.mark.parametrize("options", [{}, {"task_index": 1, "n_tasks": 3}, {"goals": "fixed"}])
def test_both_checkers_pass(options, few_goals):
    env = make_env("reach", seed=0, **options)
    sb3_check_env(env, warn=True)
    with warnings.catch_warnings():
        # Unbounded observations, and the one-hot's being a wrapper, are on purpose.
        warnings.filterwarnings("ignore", message=".*(observation space m|is different from the unwrapped).*")
        gymnasium_check_env(env, skip_render_check=True)


@pytest.mark.parametrize("task", ["reach", "pick-place", "hammer", "sweep-into", "plate-slide"])
def test_a_seed_determines_everything(task, few_goals):
    first, again, other = make_env(task, seed=4), make_env(task, seed=4), make_env(task, seed=5)
    a, b, c = roll(first), roll(again), roll(other)
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x, y)
    assert not np.array_equal(a[0][0], c[0][0])
    assert np.array_equal(first.action_space.sample(), again.action_space.sample())
    # reset(seed) starts the draw anew, on one environment and across two, and without it the draw goes on.
    for x, y in zip(roll(first, seed=9), roll(first, seed=9), strict=True):
        assert np.array_equal(x, y)
    assert np.array_equal(roll(first, seed=9)[0], roll(again, seed=9)[0])
    assert roll(first, n_steps=1, resets=12)[2] != roll(first, n_steps=1, resets=12)[2]


def test_making_and_running_leaves_the_global_generator_alone():
    # The legacy generator, from which Meta-World draws.
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    roll(make_env("reach", seed=0), n_steps=5)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_goals_are_drawn_from_fifty_and_reset_with_a_seed_draws_different_ones():
    env = make_env("reach", seed=0)
    goals = {tuple(env.reset(seed=s)[0][-3:]) for s in range(100)}
    assert 35 < len(goals) <= 50  # 50 (1 - (1 - 1/50)^100) = 43.4 expected


def test_fixed_goals_stay(few_goals):
    env = make_env("reach", seed=2, goals="fixed")
    assert len({tuple(env.reset(seed=s)[0]) for s in (None, 1, 2, None, 3)}) == 1
    assert tuple(env.reset()[0]) != tuple(make_env("reach", seed=3, goals="fixed").reset()[0])


def test_seed_none_differs_from_run_to_run(few_goals):
    assert not np.array_equal(make_env("reach", None).reset()[0], make_env("reach", None).reset()[0])


def test_a_thousand_and_one_steps_take_two_resets(few_goals):
    env = make_env("reach", seed=0)
    env.reset()
    ends = []
    for step in range(1, 1002):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        assert not terminated
        if truncated:
            ends.append(step)
            env.reset()
    assert ends == [500, 1000]


def test_a_shorter_limit_truncates(few_goals):
    env = make_env("reach", seed=0, max_episode_steps=3)
    env.reset()
    assert [env.step(np.zeros(4, np.float32))[2:4] for _ in range(3)] == [(False, False)] * 2 + [(False, True)]


def test_the_expert_succeeds_and_success_is_remembered(few_goals):
    env, expert = make_env("drawer-close", seed=0, max_episode_steps=150), ScriptedExpert("drawer-close", seed=0)
    observation, _ = env.reset()
    now, ever = [], []
    truncated = terminated = False
    while not (terminated or truncated):
        observation, _, terminated, truncated, info = env.step(expert(observation))
        now.append(bool(info["success"]))
        ever.append(info["is_success"])
    assert not terminated and any(now) and ever == list(np.maximum.accumulate(now))
    env.reset()
    assert env.step(np.zeros(4, np.float32))[4]["is_success"] is False

    env = make_env("drawer-close", seed=0, terminate_on_success=True)
    observation, _ = env.reset()
    for _ in range(now.index(True)):
        observation, _, terminated, truncated, _ = env.step(expert(observation))
        assert not terminated
    assert env.step(expert(observation))[2:4] == (True, False)


class ExpertDrives(gym.Wrapper):
    """Plays the expert's action whatever the agent says."""

    def __init__(self, env, expert):
        super().__init__(env)
        self.expert = expert

    def reset(self, **kwargs):
        self.last, info = self.env.reset(**kwargs)
        return self.last, info

    def step(self, action):
        self.last, *rest = self.env.step(self.expert(self.last))
        return self.last, *rest


class Kept(KVWriter):
    def __init__(self):
        self.values = {}

    def write(self, key_values, key_excluded, step=0):
        self.values.update(key_values)

    def close(self):
        pass


@pytest.mark.parametrize("drives", [True, False])
def test_sb3_logs_the_success_rate(drives, few_goals):
    def factory():
        env = make_env("reach", seed=0, max_episode_steps=100)
        return Monitor(ExpertDrives(env, ScriptedExpert("reach")) if drives else env)

    model, kept = PPO("MlpPolicy", DummyVecEnv([factory]), n_steps=200, batch_size=100, n_epochs=1, seed=0), Kept()
    model.set_logger(Logger(None, [kept]))
    model.learn(200)
    assert kept.values["rollout/success_rate"] == (1.0 if drives else 0.0)


def test_expert_noise_is_seeded_and_clipped(few_goals):
    observation, _ = make_env("reach", seed=0).reset()
    clean, noisy = ScriptedExpert("reach"), [ScriptedExpert("reach", noise=2.0, seed=s) for s in (1, 1, 2)]
    a, b, c = (np.array([expert(observation) for _ in range(20)]) for expert in noisy)
    assert np.array_equal(a, b) and not np.array_equal(a, c) and np.abs(a).max() == 1.0
    assert np.array_equal(clean(observation), clean(np.append(observation, [0, 1]).astype(np.float32)))
    assert clean(observation).dtype == np.float32


# Vector environments


def test_environments_of_one_task_have_goals_of_their_own_and_a_seed_repeats_them(few_goals):
    first, again, other = (make_vec_env("reach", 3, seed=s) for s in (7, 7, 8))
    a, b, c = (np.stack([venv.reset() for _ in range(3)]) for venv in (first, again, other))
    assert np.array_equal(a, b)
    assert len({tuple(goal) for goal in a[0, :, -3:]}) == 3
    assert not {tuple(goal) for goal in a[..., -3:].reshape(-1, 3)} & {tuple(g) for g in c[..., -3:].reshape(-1, 3)}
    first.seed(1)
    again.seed(1)
    assert np.array_equal(first.reset(), again.reset())
    for env in first.envs:
        assert isinstance(env, Monitor)


def test_several_tasks_go_round_and_carry_their_code(few_goals):
    venv = make_vec_env(THREE, 6, seed=0)
    assert venv.get_attr("task_name") == [resolve_task(name) for name in THREE] * 2
    assert np.array_equal(venv.reset()[:, -3:], np.tile(np.eye(3), (2, 1)))
    observation, *_ = venv.step(np.zeros((6, 4), np.float32))
    assert observation.dtype == np.float32 and np.array_equal(observation[:, -3:], np.tile(np.eye(3), (2, 1)))
    assert make_vec_env(THREE).num_envs == 3
    assert make_vec_env(["reach"], 2).observation_space.shape == (39,)  # one task needs no code


def test_the_documented_recipe_trains_three_tasks_and_no_context_mixes_them(few_goals):
    venv = make_vec_env(THREE, seed=0, context_length=40, max_episode_steps=25)
    PPO("MlpPolicy", venv, n_steps=64, batch_size=64, n_epochs=1, seed=0).learn(3 * 64)
    contexts = venv.get_attr("context")
    assert len(contexts) == 3
    for i, context in enumerate(contexts):
        states, next_states = np.asarray(context.states), np.asarray(context.next_states)
        assert states.shape == (40, 42)
        for rows in (states, next_states):
            assert np.array_equal(rows[:, -3:], np.tile(np.eye(3)[i], (40, 1)))
        # An episode's end stays inside its episode: the last state of one is never joined to the first of the next.
        assert np.array_equal(states[:, 36:39], next_states[:, 36:39])
        assert not np.asarray(context.terminated).any()


def test_context_options_reach_the_wrapper(few_goals):
    for on_reset, rows in (("keep", 5), ("clear", 0)):
        env = make_env("reach", context_length=8, on_reset=on_reset)
        env.reset()
        for _ in range(5):
            env.step(env.action_space.sample())
        env.reset()
        assert len(np.asarray(env.get_wrapper_attr("context").states)) == rows


def test_worker_processes_give_the_same_numbers():
    # Fresh processes import the package anew, so the goals are all fifty here.
    here, there = (
        make_vec_env(["reach", "drawer-close"], seed=5, max_episode_steps=4, vec_env_cls=vec_env_cls)
        for vec_env_cls in (DummyVecEnv, SubprocVecEnv)
    )
    try:
        assert np.array_equal(here.reset(), there.reset())
        for _ in range(6):
            actions = np.full((2, 4), 0.5, np.float32)
            observations, rewards, dones, _ = here.step(actions)
            their_observations, their_rewards, their_dones, _ = there.step(actions)
            assert np.array_equal(observations, their_observations) and np.array_equal(dones, their_dones)
            assert np.array_equal(rewards, their_rewards.astype(np.float32))  # DummyVecEnv rounds rewards to float32
    finally:
        there.close()


def test_workers_get_factories_and_no_environment(few_goals):
    def keep(factories):
        for factory in factories:
            assert len(cloudpickle.dumps(factory)) < 2_000  # names and numbers
        return DummyVecEnv(factories)

    make_vec_env(["reach", "drawer-close"], seed=5, vec_env_cls=keep)


def test_monitor_files(tmp_path, few_goals):
    venv = make_vec_env("reach", 2, max_episode_steps=3, monitor_dir=tmp_path / "monitor")
    venv.reset()
    for _ in range(6):
        venv.step(np.zeros((2, 4), np.float32))
    venv.close()
    assert sorted(p.name for p in (tmp_path / "monitor").iterdir()) == ["0.monitor.csv", "1.monitor.csv"]
    assert load_results(str(tmp_path / "monitor"))["l"].tolist() == [3] * 4


# What a user gets wrong


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_episode_steps": 501}, "max_episode_steps must be in 1 ... 500, Meta-World's own limit"),
        ({"max_episode_steps": 0}, "max_episode_steps must be in 1 ... 500"),
        ({"task_index": 1}, "give task_index and n_tasks together; received 1 and None"),
        ({"task_index": 3, "n_tasks": 3}, "task_index must be in 0 ... n_tasks - 1; received 3 with n_tasks 3"),
        ({"seed": -1}, "seed must be in 0 ... 2**32 - 1; received -1"),
    ],
)
def test_make_env_says_what_is_wrong(options, text, few_goals):
    with pytest.raises(ValueError, match=re.escape(text)):
        unchecked(make_env)("reach", **options)


@pytest.mark.parametrize(
    ("names", "n_envs", "text"),
    [
        ([], None, "expected at least one Meta-World task; received an empty list"),
        (["reach", "Reach_v3"], None, "received 'reach-v3' twice: n_envs makes several of each"),
        (THREE, 4, "n_envs must be a positive multiple of the number of tasks, 3"),
        ("reach", 0, "n_envs must be a positive multiple of the number of tasks, 1"),
        (["reach", "no such"], None, "unknown Meta-World task 'no such'"),
    ],
)
def test_make_vec_env_says_what_is_wrong(names, n_envs, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make_vec_env(names, n_envs)


def test_further_errors(few_goals):
    with pytest.raises(TypeError, match="a Meta-World task is named by a string, such as 'reach-v3'; received int"):
        unchecked(resolve_task)(3)
    with pytest.raises(ValueError, match='goals must be "per_reset" or "fixed"; received \'sometimes\''):
        unchecked(MetaWorldEnv.__init__)(MetaWorldEnv.__new__(MetaWorldEnv), "reach", goals="sometimes")
    with pytest.raises(gym.error.ResetNeeded, match=re.escape("call reset() before the first step()")):
        make_env("reach").step(np.zeros(4, np.float32))
    with pytest.raises(gym.error.ResetNeeded, match=re.escape("call reset() before the first step()")):
        make_env("reach", goals="fixed").step(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="noise must be a finite number of at least 0; received -1"):
        ScriptedExpert("reach", noise=-1.0)
    with pytest.raises(ValueError, match="unknown Meta-World task 'reech'; did you mean 'reach-v3'"):
        MetaWorldEnv("reech")
    with pytest.raises(ValueError, match="expected one-dimensional Box observations"):
        TaskOneHot(gym.make("FrozenLake-v1"), 0, 2)


# The house


def test_the_package_does_not_import_metaworld():
    script = "import sys, icrl_gym; sys.exit('metaworld' in sys.modules or 'mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path.home()).returncode == 0


def test_no_environment_is_ever_copied_or_pickled():
    source = inspect.getsource(icrl_gym.metaworld)
    assert not re.search(r"deepcopy|pickle\.|import pickle|import copy", source)


def test_docstring_examples():
    result = doctest.testmod(icrl_gym.metaworld)
    assert result.attempted > 20 and result.failed == 0

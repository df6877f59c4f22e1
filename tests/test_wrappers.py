"""Rolling contexts: rows written down by hand, in every way that an episode can end, alone and in vectors."""

import copy
import json
import subprocess
import sys
import time
from inspect import unwrap

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from hypothesis import given, settings
from hypothesis import strategies as st
from icrl_gym.wrappers import RollingContext, VectorRollingContext
from icrl_gym.wrappers.rolling_context import TransitionRecorder
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from icrl_gym import Context

# Worker processes cannot import a test module by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counter(gym.Env):
    """obs = [step, episode, tag]; constant reward; ends after `length` steps in the way `how` says."""

    observation_space = gym.spaces.Box(-1e3, 1e3, (3,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, length=5, how="truncated", tag=0.0, reward=1.0, reuse=False, bad=None):
        self.length, self.how, self.tag, self.reward, self.reuse, self.bad = length, how, tag, reward, reuse, bad or {}
        self.episode, self.t, self.total, self.memory = -1, 0, 0, np.zeros(3)

    def observation(self):
        self.memory[:] = self.t, self.episode, self.tag
        return self.memory if self.reuse else self.memory.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action):
        self.t, self.total = self.t + 1, self.total + 1
        end = self.t >= self.length
        observation, reward = self.observation(), self.reward
        what, value = self.bad.get(self.total, ("", 0.0))
        if what == "observation":
            observation[1] = value
        elif what == "reward":
            reward = value
        return (
            observation,
            reward,
            end and self.how in ("terminated", "both"),
            end and self.how in ("truncated", "both"),
            {},
        )


gym.register("icrl_gym_tests/Counter-v0", entry_point=lambda **kwargs: Counter(**kwargs))
ACTION = np.zeros(1, np.float32)


def unchecked(cls, *args):
    """A constructor's call past the type checker of the tests, as a user makes it."""
    instance = cls.__new__(cls)
    unwrap(cls.__init__)(instance, *args)
    return instance


def run(env, n_steps):
    """Step an environment as Gymnasium says, resetting at either flag."""
    env.reset(seed=0)
    for _ in range(n_steps):
        if any(env.step(ACTION)[2:4]):
            env.reset()


def rows(context):
    """(state's step, state's episode, next state's step, terminated, truncated) of every row."""
    return [
        (*s[:2], s_next[0], t, u)
        for s, s_next, t, u in zip(
            context.states.tolist(), context.next_states.tolist(), context.terminated.tolist(), context.truncated.tolist(), strict=True
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    "how, flags", [("terminated", (True, False)), ("truncated", (False, True)), ("both", (True, True))]
)
@pytest.mark.parametrize("reuse", [False, True])
def test_rows_of_two_episodes(how, flags, reuse):
    env = RollingContext(Counter(3, how, reuse=reuse), length=10)
    run(env, 5)
    none = (False, False)
    assert rows(env.context) == [
        (0, 0, 1, *none),
        (1, 0, 2, *none),
        (2, 0, 3, *flags),
        (0, 1, 1, *none),
        (1, 1, 2, *none),
    ]
    assert env.context.rewards.tolist() == [1.0] * 5
    assert env.context.states.dtype == torch.float64


def test_a_time_limit_outside_and_a_reset_at_will_cut_the_last_row():
    env = TimeLimit(RollingContext(Counter(100), length=20), 5)
    run(env, 10)
    context = env.get_wrapper_attr("context")
    assert context.truncated.nonzero().flatten().tolist() == [4, 9]
    assert not context.terminated.any()
    env.reset()
    env.step(ACTION)
    env.reset()
    assert rows(env.get_wrapper_attr("context"))[-1] == (0, 3, 1, False, True)


def test_only_the_newest_are_kept_in_order():
    env = RollingContext(Counter(3), length=4)
    run(env, 8)
    assert [r[:2] for r in rows(env.context)] == [(1, 1), (2, 1), (0, 2), (1, 2)]


def test_clear_on_reset_keeps_the_present_episode_only():
    env = RollingContext(Counter(3), length=10, on_reset="clear")
    run(env, 5)
    assert [r[:2] for r in rows(env.context)] == [(0, 1), (1, 1)]
    run(env, 3)
    assert len(env.context) == 0


def test_the_sign_of_odd_episodes_is_seen_only_when_cleared():
    class Alternating(Counter):
        observation_space = gym.spaces.Box(-1, 1, (1,))

        def observation(self):
            return np.zeros(1, np.float32)

        def step(self, action):
            self.reward = -1.0 if self.episode % 2 else 1.0
            return super().step(action)

    import math

    from icrl_gym import InContextTransformer
    from icrl_gym.kernels import RBFKernel

    transformer = InContextTransformer(RBFKernel(1.0), gamma=0.5, n_layers=math.inf, ridge=1e-9)
    values = {"clear": [], "keep": []}
    for on_reset, seen in values.items():
        env = RollingContext(Alternating(10), length=100, on_reset=on_reset)
        env.reset()
        for step in range(1, 41):
            if any(env.step(np.zeros(1))[2:4]):
                env.reset()
            if step % 10 == 2:
                seen.append(float(transformer.condition(env.context)([[0.0]])))
    even, odd = values["clear"][2], values["clear"][3]
    assert even == pytest.approx(2.0, abs=1e-3) and odd == pytest.approx(-even, abs=1e-6)
    assert all(-2.0 < v < 2.0 for v in values["keep"][1:])


def test_everything_passes_through_unchanged():
    env = RollingContext(Counter(3, reuse=True))
    observation, info = env.reset(seed=1, options={})
    assert observation is env.unwrapped.memory and info == {}
    result = env.step(ACTION)
    assert result[0] is env.unwrapped.memory and result[4] == {}
    assert env.observation_space is env.unwrapped.observation_space


@pytest.mark.filterwarnings("ignore:.*For Box action spaces, we recommend.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version.*:UserWarning")
def test_gymnasium_s_checker_is_content():
    check_env(RollingContext(gym.make("Pendulum-v1").unwrapped), skip_render_check=True)


SPACES = [
    gym.spaces.Discrete(5),
    gym.spaces.Discrete(5, start=2),
    gym.spaces.MultiDiscrete([2, 3]),
    gym.spaces.MultiBinary(4),
    gym.spaces.Box(-1, 1, (2, 3)),
    gym.spaces.Box(-1, 1, (), np.float64),
    gym.spaces.Box(0, 255, (4,), np.uint8),
    gym.spaces.Dict(
        b=gym.spaces.Discrete(3), a=gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiBinary(2)])
    ),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_space_that_flattens_is_flattened_as_gymnasium_does(space):
    class Samples(gym.Env):
        observation_space, action_space = space, gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return space.sample(), {}

        def step(self, action):
            return space.sample(), 0.0, False, False, {}

    env = RollingContext(Samples(), length=8)
    seen = [env.reset()[0], *(env.step(0)[0] for _ in range(4))]
    flat = np.array([gym.spaces.flatten(space, o) for o in seen], float)
    np.testing.assert_array_equal(env.context.states, flat[:-1])
    np.testing.assert_array_equal(env.context.next_states, flat[1:])
    np.testing.assert_array_equal(env.context_snapshot().observation, flat[-1])


def test_observations_and_rewards_that_are_not_finite_are_refused_counted_and_said_once():
    bad = {7: ("observation", np.nan), 12: ("reward", np.inf)}
    env = RollingContext(Counter(100, bad=bad), length=50)
    with pytest.warns(RuntimeWarning, match="left out of the context") as record:
        run(env, 40)
    assert len(record) == 1 and env.n_refused == 2
    steps = [r[0] for r in rows(env.context)]
    # The row into the bad observation and the one out of it, and the row of the bad reward.
    assert steps == [t for t in range(40) if t not in (6, 7, 11)]
    # A reset after a dropped row cuts nothing that went on.
    assert not env.context.truncated.any()


def test_huge_but_finite_values_are_data():
    env = RollingContext(Counter(100, bad={3: ("observation", 1e200), 5: ("reward", 1e30)}), length=50)
    run(env, 10)
    assert len(env.context) == 10 and env.n_refused == 0


def test_copies_and_specs():
    env = RollingContext(Counter(), length=7)
    run(env, 2)
    clone = copy.deepcopy(env)
    clone.step(ACTION)
    assert len(env.context) == 2 and len(clone.context) == 3
    made = RollingContext(
        gym.make("icrl_gym_tests/Counter-v0", length=9, disable_env_checker=True), length=99, on_reset="clear"
    )
    again = gym.make(made.spec)
    assert again.get_wrapper_attr("length") == 99 and again._recorder.on_reset == "clear"
    assert again.unwrapped.length == 9
    pendulum = RollingContext(gym.make("Pendulum-v1"), length=33).spec
    assert gym.make(type(pendulum).from_json(pendulum.to_json())).get_wrapper_attr("length") == 33
    assert json.loads(pendulum.to_json())


@pytest.mark.parametrize("vec_env_cls", [DummyVecEnv, SubprocVecEnv])
def test_contexts_are_pulled_through_layers_and_processes(vec_env_cls):
    def factory(tag):
        return lambda: Monitor(TimeLimit(RollingContext(Counter(100, tag=tag), length=8), 3))

    env = vec_env_cls([factory(0.0), factory(1.0)])
    try:
        env.reset()
        for _ in range(4):
            env.step(np.zeros((2, 1)))
        snapshots = env.env_method("context_snapshot")
        for tag, snapshot in enumerate(snapshots):
            assert (snapshot.context.states[:, 2] == tag).all()
            assert snapshot.context.truncated.tolist() == [False, False, True, False]
            assert snapshot.observation.tolist() == [1.0, 1.0, tag]
            assert (snapshot.n_refused, snapshot.length) == (0, 8)
        assert len(env.env_method("context_snapshot", newest=2)[0].context) == 2
        assert len(env.get_attr("context")[0]) == 4
        saved = snapshots[0].context
        env.env_method("clear_context")
        assert [len(c) for c in env.get_attr("context")] == [0, 0]
        env.env_method("load_context", saved, indices=1)
        assert env.get_attr("context")[1] == saved
    finally:
        env.close()


def test_before_the_first_reset_there_is_no_observation():
    snapshot = RollingContext(Counter()).context_snapshot()
    assert snapshot.observation is None and len(snapshot.context) == 0


# At the door


def test_a_vector_environment_is_told_where_to_go():
    envs = gym.make_vec("CartPole-v1", num_envs=2)
    with pytest.raises(TypeError, match=r"inside the function that makes it .* or use VectorRollingContext"):
        unchecked(RollingContext, envs)
    with pytest.raises(TypeError, match="Use RollingContext for a single one"):
        unchecked(VectorRollingContext, Counter())
    envs.close()


def test_meta_world_s_vector_ids_are_told_where_to_go():
    import metaworld

    assert metaworld.MT10
    envs = gym.make_vec("Meta-World/MT10", vector_strategy="sync", seed=1)
    with pytest.raises(TypeError, match="got the vector environment"):
        unchecked(RollingContext, envs)
    envs.close()


def test_two_rolling_contexts_are_one_too_many():
    with pytest.raises(ValueError, match="already has a RollingContext"):
        RollingContext(TimeLimit(RollingContext(Counter()), 5))


@pytest.mark.parametrize(
    "space, message",
    [
        (gym.spaces.Box(0, 255, (8, 8, 3), np.uint8), "the observation space is an image"),
        (
            gym.spaces.Dict(camera=gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)),
            "'camera' of the observation space is an image",
        ),
        (gym.spaces.Sequence(gym.spaces.Discrete(2)), "have no fixed number of entries"),
        (gym.spaces.Graph(gym.spaces.Discrete(2), None), "have no fixed number of entries"),
    ],
)
def test_spaces_that_do_not_flatten_say_so(space, message):
    env = Counter()
    env.observation_space = space
    with pytest.raises(ValueError, match=message):
        RollingContext(env)


def test_wrong_options_say_so():
    with pytest.raises(ValueError, match=r"at least 1 transition, got 0"):
        RollingContext(Counter(), length=0)
    with pytest.raises(ValueError, match="on_reset must be one of"):
        unchecked(TransitionRecorder, Counter.observation_space, 8, "forget")


# Vectors


def vector(mode, cls=SyncVectorEnv, **options):
    # Lengths that differ, so that the environments end at different times.
    return cls(
        [lambda i=i: Counter(3 + i, ("terminated", "truncated")[i % 2], tag=i, **options) for i in range(3)],
        autoreset_mode=mode,
    )


def alone(i, n_steps, on_reset="keep", length=64, **options):
    env = RollingContext(
        Counter(3 + i, ("terminated", "truncated")[i % 2], tag=i, **options), length=length, on_reset=on_reset
    )
    run(env, n_steps)
    return env.context


def drive(envs, n_steps):
    """Step a vector environment, resetting by hand where it does not by itself."""
    envs.reset(seed=0)
    steps = np.zeros(envs.num_envs, int)
    ended = np.zeros(envs.num_envs, bool)
    mode = envs.metadata["autoreset_mode"]
    for _ in range(n_steps):
        _, _, terminated, truncated, _ = envs.step(np.zeros((envs.num_envs, 1), np.float32))
        counts = ~ended if mode is AutoresetMode.NEXT_STEP else np.ones_like(ended)
        steps += counts
        ends = np.logical_or(terminated, truncated)
        if mode is AutoresetMode.DISABLED and ends.any():
            envs.reset(options={"reset_mask": ends})
        ended = ends & counts
    return steps


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("cls", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("on_reset", ["keep", "clear"])
def test_vectors_give_the_rows_of_each_environment_alone(mode, cls, on_reset):
    envs = VectorRollingContext(vector(mode, cls), length=64, on_reset=on_reset)
    steps = drive(envs, 17)
    for i, context in enumerate(envs.contexts):
        expected = alone(i, int(steps[i]), on_reset)
        if on_reset == "clear" and mode is AutoresetMode.NEXT_STEP and not len(expected):
            # The environment alone has been reset already; this one will be by its next step.
            expected = context
        assert context == expected
    assert len(envs.context_snapshots(newest=1)[0].context) <= 1
    envs.clear_contexts()
    assert all(len(c) == 0 for c in envs.contexts)
    envs.close()


@settings(deadline=None, max_examples=20)
@given(n_steps=st.integers(0, 30), mode=st.sampled_from(list(AutoresetMode)), length=st.integers(1, 9))
def test_vectors_of_any_length(n_steps, mode, length):
    envs = VectorRollingContext(vector(mode), length=length)
    steps = drive(envs, n_steps)
    assert all(c == alone(i, int(steps[i]), length=length) for i, c in enumerate(envs.contexts))


def test_vectors_refuse_what_is_not_finite():
    envs = VectorRollingContext(vector(AutoresetMode.SAME_STEP, bad={2: ("reward", np.nan)}), length=8)
    with pytest.warns(RuntimeWarning, match="left out of the context"):
        drive(envs, 4)
    assert envs.n_refused == 3


def test_a_vector_environment_without_a_mode_says_so():
    envs = vector(AutoresetMode.NEXT_STEP)
    envs.metadata = {}
    with pytest.raises(ValueError, match="does not declare its autoreset mode"):
        VectorRollingContext(envs)


def test_the_way_to_import_is_through_the_package():
    # `import wrappers` from the root of the tree would be a second module with a second class.
    found = subprocess.run(
        ["git", "grep", "-nE", r"^\s*(import|from) (wrappers|callbacks)\b", "--", "*.py", "*.md"],
        capture_output=True, text=True, cwd=__file__.rsplit("/", 2)[0],
    )  # fmt: skip
    assert found.stdout == ""


def test_a_step_does_not_depend_on_the_length():
    def seconds(length):
        env = RollingContext(Counter(1000), length=length)
        env.reset()
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(400):
                env.step(ACTION)
            best = min(best, time.perf_counter() - start)
        return best

    # A copy of the context at every step would differ by a factor of hundreds.
    assert seconds(65_536) < 20 * seconds(16)


def test_a_loaded_context_must_fit():
    with pytest.raises(ValueError, match="states with 3 entries"):
        RollingContext(Counter()).load_context(Context.empty(2))

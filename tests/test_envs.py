"""Synthetic Markov reward processes: their exact values against loops, Bellman's equation and returns that were added up."""

import doctest
import importlib
import json
import math
import pickle
import warnings
from inspect import unwrap

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

import icrl_gym.envs
import icrl_gym.envs.boyan_chain
import icrl_gym.envs.kernel_mrp
from icrl_gym import InContextTransformer
from icrl_gym.envs import BoyanChain, KernelMRP
from icrl_gym.kernels import LinearKernel, MaternKernel, RBFKernel, SoftmaxKernel

KERNEL, BOYAN = "icrl_gym/KernelMRP-v0", "icrl_gym/BoyanChain-v0"

CONFIGURATIONS = [
    (KERNEL, {}),
    (KERNEL, {"n_features": 3, "kernel": "linear", "termination": 0.3, "reward": "expected", "seed": 5}),
    (KERNEL, {"n_features": 2, "kernel": MaternKernel(0.5), "n_centers": 3, "termination": 1.0, "gamma": 1.0}),
    (KERNEL, {"kernel": "laplacian", "temperature": 0.3, "n_moves": 1}),
    (BOYAN, {}),
    (BOYAN, {"n_states": 2, "n_features": 1, "gamma": 0.0, "seed": 3}),
    (BOYAN, {"n_states": 13, "n_features": 20, "representable": True}),
]


def roll(env, n, seed=0):
    """n steps by the public interface: observations, rewards, what came next, terminated, and the values in info."""
    observation, info = env.reset(seed=seed)
    rows = []
    for _ in range(n):
        after, reward, terminated, truncated, next_info = env.step(0)
        rows.append((observation, reward, after, terminated, info["value"], next_info["value"]))
        observation, info = (after, next_info) if not (terminated or truncated) else env.reset()
    return [np.array(column) for column in zip(*rows, strict=True)]


def discounted_returns(env, state, n_episodes, n_steps):
    """Returns from one state, each added up reward by reward."""
    returns = np.zeros(n_episodes)
    for episode in range(n_episodes):
        env.reset(seed=episode, options={"state": state})
        discount = 1.0
        for _ in range(n_steps):
            _, reward, terminated, _, _ = env.step(0)
            returns[episode] += discount * reward
            discount *= env.gamma
            if terminated:
                break
    return returns


def standard_error(sample):
    return sample.std(ddof=1) / math.sqrt(len(sample))


# --- both, as environments ---


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_both_checkers_pass_without_a_warning(name, options):
    env = gym.make(name, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
        check_env_of_sb3(env.unwrapped)
        check_env_of_sb3(env)


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_a_seed_reproduces_trajectories_and_contexts(name, options):
    first, second = gym.make(name, **options), gym.make(name, **options)
    for a, b in zip(roll(first, 30, seed=4), roll(second, 30, seed=4), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(roll(first, 30, seed=4)[1], roll(first, 30, seed=5)[1])
    for iid in (False, True):
        context = first.unwrapped.sample_context(25, seed=2, iid=iid)
        assert context == second.unwrapped.sample_context(25, seed=2, iid=iid)
        assert context != first.unwrapped.sample_context(25, seed=3, iid=iid)
        assert context.states.dtype == torch.float64 and len(context) == 25


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_sampling_a_context_leaves_the_episode_alone(name, options):
    with_context, without = gym.make(name, **options).unwrapped, gym.make(name, **options).unwrapped
    for env in (with_context, without):
        env.reset(seed=1)
    with_context.sample_context(10, seed=0)
    assert with_context.step(0)[1] == without.step(0)[1]


def test_a_generator_moves_on():
    env, rng = KernelMRP(), np.random.default_rng(0)
    assert env.sample_context(5, rng) != env.sample_context(5, rng)


@pytest.mark.parametrize("name", [KERNEL, BOYAN])
def test_structure_trajectories_and_contexts_of_one_seed_share_no_numbers(name):
    env = gym.make(name, seed=7).unwrapped
    other = gym.make(name, seed=8).unwrapped
    if name == KERNEL:
        assert not np.array_equal(env.centers, other.centers) and not np.array_equal(env.weights, other.weights)
        state, _ = env.reset(seed=7)
        states = env.sample_context(50, seed=7, iid=True).states.numpy()
        assert not np.isin(states, np.concatenate([np.float32(env.centers), state[None]])).any()
    else:
        assert not np.array_equal(env.features, other.features) and not np.array_equal(env.rewards, other.rewards)
    before = env.sample_context(5, seed=0)
    env.reset(seed=123)
    assert env.sample_context(5, seed=0) == before  # reset's seed does not touch the structure


@pytest.mark.parametrize("name", [KERNEL, BOYAN])
def test_registration(name):
    env = gym.make(name, gamma=0.5, seed=3, max_episode_steps=7)
    assert env.unwrapped.gamma == 0.5
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.unwrapped.sample_context(5, seed=0) == env.unwrapped.sample_context(5, seed=0)
    pickle.dumps(env.spec)
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(7)]
    assert ends == [(False, False)] * 6 + [(False, True)]
    importlib.reload(icrl_gym.envs)  # warnings are errors: a second registration would raise


def test_a_restored_environment_goes_on_where_it_was():
    env = KernelMRP()
    env.reset(seed=0)
    twin = pickle.loads(pickle.dumps(env))
    assert [env.step(0)[1] for _ in range(2)] == [twin.step(0)[1] for _ in range(2)]


@pytest.mark.parametrize("module", [icrl_gym.envs.kernel_mrp, icrl_gym.envs.boyan_chain])
def test_docstring_examples(module):
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("name", [KERNEL, BOYAN])
def test_there_are_no_steps_outside_of_an_episode(name):
    env = gym.make(name).unwrapped
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env.step(0)
    if name == KERNEL:
        env = KernelMRP(termination=1.0)
        env.reset(seed=0)
        assert env.step(0)[2]
        with pytest.raises(gym.error.ResetNeeded, match="after a terminated step"):
            env.step(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_features": 0}, "n_features must be a whole number of at least 1, got 0"),
        ({"n_centers": -1}, "n_centers must be"),
        ({"n_moves": 0}, "n_moves must be"),
        ({"gamma": 1.5}, r"gamma must be a number in \[0, 1\], got 1.5"),
        ({"gamma": math.nan}, "gamma must be"),
        ({"gamma": 1.0}, "infinite sums; set a smaller gamma"),
        ({"termination": -0.1}, "termination must be"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"kernel": "median"}, "unknown kernel 'median'; expected one of rbf"),
        ({"kernel": "linear", "temperature": 1.0}, "has no temperature"),
        ({"kernel": RBFKernel(1.0), "temperature": 1.0}, "Leave temperature out"),
        ({"kernel": SoftmaxKernel(1.0)}, "must be positive definite"),
        ({"kernel": "relu"}, "must be positive definite"),
        ({"kernel": RBFKernel("median")}, "constants of its own"),
        ({"kernel": LinearKernel() + RBFKernel("median")}, "constants of its own"),
        ({"kernel": "rbf", "temperature": -1.0}, "temperature must be positive"),
        ({"kernel": RBFKernel(torch.ones(2))}, "Use one temperature"),
    ],
)
def test_kernel_mrp_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        KernelMRP(**options)


def test_an_unknown_word_for_reward_is_refused_by_name():
    # Not through the type checker of the test run, which would say so first.
    with pytest.raises(ValueError, match='reward must be "transition" or "expected", got \'mean\''):
        unwrap(KernelMRP.__init__)(KernelMRP.__new__(KernelMRP), reward="mean")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_states": 1}, "n_states must be a whole number of at least 2, got 1"),
        ({"n_features": 0}, "n_features must be"),
        ({"gamma": 1.0}, "gamma must be below 1"),
        ({"gamma": -1.0}, "gamma must be a number in"),
        ({"seed": -3}, "seed must be"),
    ],
)
def test_boyan_chain_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        BoyanChain(**options)


def test_methods_refuse_at_the_door():
    env, chain = KernelMRP(n_features=2), BoyanChain(n_states=5)
    with pytest.raises(ValueError, match=r"shape \(m, 2\), got \(3,\)"):
        env.value(np.zeros(3))
    with pytest.raises(ValueError, match="reset knows one option"):
        env.reset(options={"states": [0.0, 0.0]})
    for state in ([0.0], [0.0, 1.5], [0.0, math.nan]):
        with pytest.raises(ValueError, match=r"shape \(2,\) and lie in \[-1, 1\]"):
            env.reset(options={"state": state})
    for options in ({"state": 5}, {"state": -1}, {"state": 0.5}):
        with pytest.raises(ValueError, match="whole number"):
            chain.reset(options=options)
    for states in ([5], [-1], [0.5], chain.features):
        with pytest.raises(ValueError, match="whole numbers in 0"):
            chain.value(states)
    with pytest.raises(ValueError, match=r"predicted must have shape \(5,\)"):
        chain.msve(np.zeros((5, 1)))
    with pytest.raises(ValueError, match="weights must have shape"):
        chain.msve(np.zeros(5), weights=np.ones(4))
    for mrp in (env, chain):
        with pytest.raises(ValueError, match="n must be a whole number of at least 0, got -1"):
            mrp.sample_context(-1, seed=0)
        with pytest.raises(ValueError, match="seed must be"):
            mrp.sample_context(1, seed=-1)
        assert len(mrp.sample_context(0, seed=0)) == len(mrp.sample_context(0, seed=0, iid=True)) == 0


# --- KernelMRP ---


def test_the_value_is_the_sum_over_centers():
    temperature = 0.4
    env = KernelMRP(n_features=2, temperature=temperature, n_centers=6, seed=2)
    states = np.random.default_rng(0).uniform(-1, 1, (9, 2))
    expected = np.zeros(9)
    for m, state in enumerate(states):
        for center, weight in zip(env.centers, env.weights, strict=True):
            squared = sum((a - b) ** 2 for a, b in zip(center, state, strict=True))
            expected[m] += weight * math.exp(-squared / (2 * temperature))
    assert np.allclose(env.value(states), expected, rtol=0, atol=1e-14)
    assert np.allclose(env.value(torch.tensor(states)), expected, rtol=0, atol=1e-14)
    assert np.allclose(env.value(states.reshape(3, 3, 2).tolist()), expected.reshape(3, 3), rtol=0, atol=1e-14)


def test_the_default_kernel_is_an_rbf_of_temperature_one_tenth():
    explicit = KernelMRP(kernel=RBFKernel(temperature=0.1))
    states = np.linspace(-1, 1, 20)[:, None]
    assert np.array_equal(KernelMRP().value(states), explicit.value(states))


def test_the_environment_keeps_its_kernel_when_the_one_passed_changes():
    kernel = RBFKernel(0.1)
    env = KernelMRP(kernel=kernel)
    before = env.value([[0.3]])
    kernel.temperature.fill_(9.0)
    assert env.value([[0.3]]) == before


processes = st.builds(
    KernelMRP,
    n_features=st.integers(1, 4),
    kernel=st.sampled_from(["rbf", "laplacian", "matern", "linear"]),
    n_centers=st.integers(1, 5),
    gamma=st.floats(0, 0.99),
    termination=st.floats(0, 1),
    n_moves=st.integers(1, 5),
    seed=st.integers(0, 2**63),
)


@settings(max_examples=30, deadline=None)
@given(processes, st.integers(0, 2**31))
def test_every_transition_has_a_td_error_of_zero(env, seed):
    states, rewards, next_states, terminated, values, next_values = roll(env, 20, seed)
    assert states.dtype == np.float32 and (np.abs(next_states) <= 1).all()
    # From the observations alone: they lose nothing.
    delta = rewards + env.gamma * (1 - terminated) * env.value(next_states) - env.value(states)
    assert np.abs(delta).max() < 1e-12
    assert np.allclose(values, env.value(states), rtol=0, atol=1e-12)
    assert np.allclose(next_values, env.value(next_states), rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(processes, st.integers(0, 2**31), st.booleans())
def test_a_context_holds_transitions_of_the_process(env, seed, iid):
    context = env.sample_context(20, seed=seed, iid=iid)
    states, next_states = context.states.numpy(), context.next_states.numpy()
    terminated = context.terminated.numpy()
    assert (np.abs(states) <= 1).all() and (np.abs(next_states) <= 1).all()
    # Some move leads there, up to a side that is joined to its opposite and rounding to float32.
    gap = np.abs(states[:, None] + env.moves - next_states[:, None])
    assert (np.minimum(gap, np.abs(gap - 2)).max(-1).min(-1) < 1e-6).all()
    follows = (next_states[:-1] == states[1:]).all(-1)
    if iid:
        assert np.array_equal(context.truncated.numpy(), ~terminated)
        assert not follows.any()
    else:
        assert not context.truncated.any()
        assert np.array_equal(follows, ~terminated[:-1])
    delta = context.rewards.numpy() + env.gamma * ~terminated * env.value(next_states) - env.value(states)
    assert np.abs(delta).max() < 1e-12


@pytest.mark.parametrize("termination", [0.0, 0.2])
def test_expected_rewards_satisfy_the_bellman_equation_exactly(termination):
    env = KernelMRP(n_features=2, termination=termination, gamma=0.8, reward="expected", seed=4)
    context = env.sample_context(40, seed=0)
    for state, reward in zip(context.states.numpy(), context.rewards.numpy(), strict=True):
        ahead = 0.0
        for move in env.moves:  # the displacements by hand, and the box's sides joined
            there = state + move
            there = np.where(there >= 1, there - 2, np.where(there < -1, there + 2, there))
            ahead += env.value(np.float32(there))[()] / len(env.moves)
        assert abs(reward + 0.8 * (1 - termination) * ahead - env.value(state)[()]) < 1e-12
    states, rewards, *_ = roll(env, 40)
    again = {tuple(s): r for s, r in zip(states, rewards, strict=True)}
    env.reset(options={"state": states[0]})
    assert env.step(0)[1] == again[tuple(states[0])]  # of the state alone


def test_expected_rewards_leave_td_errors_of_mean_zero():
    env = KernelMRP(termination=0.1, reward="expected", seed=1)
    context = env.sample_context(4000, seed=0, iid=True)
    ahead = env.value(context.next_states) * ~context.terminated.numpy()
    delta = context.rewards.numpy() + env.gamma * ahead - env.value(context.states)
    assert abs(delta.mean()) < 5 * standard_error(delta)
    assert delta.std() > 0.05  # there is noise to average


@pytest.mark.parametrize("reward", ["transition", "expected"])
@pytest.mark.parametrize("termination", [0.0, 0.2])
def test_returns_average_to_the_value(reward, termination):
    env = KernelMRP(n_features=2, gamma=0.7, termination=termination, reward=reward, temperature=0.3, seed=3)
    state = [0.25, -0.5]
    value = env.value(state)[()]
    returns = discounted_returns(env, state, 100 if reward == "expected" else 10, 40)
    left = 0.7**40 * np.abs(env.weights).sum()  # of what was not added up
    assert abs(returns.mean() - value) < 5 * standard_error(returns) + left
    # Every single return is the value where nothing but the next state's value is random, or has been paid for.
    assert reward == "expected" or np.abs(returns - value).max() < left + 1e-12


def test_terminations_come_as_often_as_was_said():
    terminated = KernelMRP(termination=0.3).sample_context(3000, seed=0).terminated.numpy()
    assert abs(terminated.mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 3000)


def test_the_uniform_distribution_is_stationary():
    env = KernelMRP(n_features=2, seed=6)
    context = env.sample_context(20_000, seed=0, iid=True)
    for states in (context.states, context.next_states):
        counts = np.histogram2d(*states.numpy().T, bins=5, range=[[-1, 1], [-1, 1]])[0]
        expected = 20_000 / 25
        assert ((counts - expected) ** 2 / expected).sum() < 24 + 5 * math.sqrt(2 * 24)  # chi-squared, 24 degrees
    trajectory = env.sample_context(20_000, seed=0).states.numpy()
    assert np.abs(trajectory.mean(0)).max() < 0.05 and np.abs(trajectory.var(0) - 1 / 3).max() < 0.05


@pytest.mark.parametrize("iid", [False, True])
@pytest.mark.parametrize(("n_features", "kernel"), [(1, RBFKernel(0.1)), (2, RBFKernel(0.1)), (1, MaternKernel(0.5))])
def test_the_fast_path_recovers_the_value(n_features, kernel, iid):
    env = KernelMRP(n_features=n_features, kernel=kernel, termination=0.05, seed=0)
    transformer = InContextTransformer(kernel, gamma=env.gamma, n_layers=math.inf, ridge=1e-10)
    value = transformer.condition(env.sample_context(200, seed=0, iid=iid))
    states = np.random.default_rng(1).uniform(-1, 1, (500, n_features))
    truth = env.value(states)
    assert np.sqrt(((value(states).numpy() - truth) ** 2).mean()) < 0.02 * truth.std()


def test_the_fast_path_averages_the_noise_of_expected_rewards():
    errors = {150: 0.0, 1000: 0.0}
    for seed in range(4):
        env = KernelMRP(reward="expected", gamma=0.7, seed=seed)
        transformer = InContextTransformer(env.kernel, gamma=0.7, n_layers=math.inf, ridge=1e-3)
        states = np.linspace(-1, 1, 200)[:, None]
        truth = env.value(states)
        for n in errors:
            value = transformer.condition(env.sample_context(n, seed=0, iid=True))
            errors[n] += np.sqrt(((value(states).numpy() - truth) ** 2).mean()) / truth.std() / 4
    assert errors[1000] < 0.12 and errors[1000] < errors[150] / 1.5


# --- BoyanChain ---

chains = st.builds(
    BoyanChain,
    n_states=st.integers(2, 12),
    n_features=st.integers(1, 6),
    gamma=st.floats(0, 0.99),
    representable=st.booleans(),
    seed=st.integers(0, 2**63),
)


@settings(max_examples=50, deadline=None)
@given(chains)
def test_a_chain_has_boyans_structure(chain):
    m, p = chain.n_states, chain.transitions
    allowed = np.zeros((m, m), bool)
    for i in range(m - 2):
        allowed[i, [i + 1, i + 2]] = True
    allowed[m - 2, m - 1] = True
    allowed[m - 1] = True
    assert np.array_equal(p > 0, allowed) and (p >= 0).all()
    assert np.allclose(p.sum(1), 1, rtol=0, atol=1e-14)
    assert p[m - 2, m - 1] == 1
    assert (chain.initial > 0).all() and abs(chain.initial.sum() - 1) < 1e-14
    assert chain.features.shape == (m, chain.n_features) and (np.abs(chain.features) <= 1).all()
    assert np.array_equal(chain.features, np.float32(chain.features))


@settings(max_examples=50, deadline=None)
@given(chains)
def test_the_values_of_a_chain_solve_the_bellman_equation(chain):
    values = np.zeros(chain.n_states)
    for _ in range(4000):  # 0.99 ** 4000 is 3e-18
        values = chain.rewards + chain.gamma * chain.transitions @ values
    assert np.allclose(chain.values, values, rtol=1e-9, atol=1e-9)
    assert np.array_equal(chain.value([1, 0, 1]), chain.values[[1, 0, 1]])
    assert chain.msve(chain.values) == 0
    assert math.isclose(chain.msve(chain.values + 2), 4, rel_tol=1e-9)
    assert math.isclose(
        chain.msve(torch.tensor(chain.values - 1), weights=np.arange(chain.n_states)),
        sum(range(chain.n_states)),
        rel_tol=1e-9,
    )


@settings(max_examples=50, deadline=None)
@given(chains)
def test_the_stationary_distribution_is_where_the_chain_settles(chain):
    # Averages over time, since a chain of two states can alternate for long.
    distribution = chain.initial
    for _ in range(20):
        distribution = distribution @ np.linalg.matrix_power(0.5 * (np.eye(chain.n_states) + chain.transitions), 200)
    assert np.allclose(chain.stationary, distribution, rtol=0, atol=1e-10)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.integers(1, 6), st.floats(0, 0.99), st.integers(0, 2**63))
def test_representable_values_are_linear_in_the_features(n_states, n_features, gamma, seed):
    chain = BoyanChain(n_states, n_features, gamma, representable=True, seed=seed)
    fitted = np.linalg.lstsq(chain.features, chain.values, rcond=None)[0]
    assert np.abs(chain.features @ fitted - chain.values).max() < 1e-10
    assert np.allclose(chain.features @ chain.weights, chain.values, rtol=0, atol=1e-10)
    free = BoyanChain(n_states, n_features, gamma, seed=seed)
    assert free.weights is None and (np.abs(free.rewards) <= 1).all()
    assert np.array_equal(free.transitions, chain.transitions) and np.array_equal(free.features, chain.features)


def test_values_of_a_free_task_are_not_linear_in_few_features():
    chain = BoyanChain(n_states=10, n_features=4)
    fitted = np.linalg.lstsq(chain.features, chain.values, rcond=None)[0]
    assert np.abs(chain.features @ fitted - chain.values).max() > 0.01


@pytest.mark.parametrize("representable", [False, True])
def test_returns_of_a_chain_average_to_its_values(representable):
    chain = BoyanChain(n_states=6, gamma=0.7, representable=representable, seed=2)
    for state in (0, 5):
        returns = discounted_returns(chain, state, 300, 45)
        left = 0.7**45 * np.abs(chain.values).max()
        assert abs(returns.mean() - chain.values[state]) < 5 * standard_error(returns) + left


def test_what_is_observed_of_a_chain():
    chain = BoyanChain(n_states=5, seed=1)
    observation, info = chain.reset(seed=0, options={"state": 3})
    assert info == {"state": 3, "value": chain.values[3]}
    assert observation.dtype == np.float32 and np.array_equal(observation, chain.features[3])
    after, reward, terminated, truncated, info = chain.step(0)
    assert reward == chain.rewards[3] and info["state"] == 4 and np.array_equal(after, chain.features[4])
    assert not terminated and not truncated


def test_a_context_of_a_chain_follows_its_transitions():
    chain = BoyanChain(n_states=6, seed=1)
    index = {tuple(row): i for i, row in enumerate(chain.features)}
    n = 3000
    for iid in (False, True):
        context = chain.sample_context(n, seed=0, iid=iid)
        states = np.array([index[tuple(row)] for row in context.states.tolist()])
        next_states = np.array([index[tuple(row)] for row in context.next_states.tolist()])
        assert np.array_equal(context.rewards.numpy(), chain.rewards[states])
        assert not context.terminated.any() and bool((context.truncated == iid).all())
        assert np.array_equal(next_states[:-1], states[1:]) != iid
        counts = np.zeros((6, 6))
        np.add.at(counts, (states, next_states), 1)
        visits = counts.sum(1, keepdims=True)
        tolerance = 5 * np.sqrt(chain.transitions * (1 - chain.transitions) / visits) + 1e-9
        assert (np.abs(counts / visits - chain.transitions) < tolerance).all()
        if iid:
            share = visits[:, 0] / n
            assert (np.abs(share - chain.stationary) < 5 * np.sqrt(chain.stationary / n)).all()
    starts = [index[tuple(chain.sample_context(1, seed=seed).states[0].tolist())] for seed in range(1000)]
    share = np.bincount(starts, minlength=6) / 1000
    assert (np.abs(share - chain.initial) < 5 * np.sqrt(chain.initial / 1000)).all()


def test_linear_attention_approaches_the_values_of_representable_chains():
    transformer = InContextTransformer(LinearKernel(), gamma=0.9, n_layers=math.inf, ridge=1e-6)
    for n, bound in ((500, 0.2), (1500, 0.05)):
        surprise = []
        for seed in range(6):
            chain = BoyanChain(representable=True, seed=seed)
            value = transformer.condition(chain.sample_context(n, seed=100 + seed))
            error = chain.msve(value(chain.features))
            # What least-squares TD errs by on average in n transitions: w - w* = A^-1 sum_t phi_t delta_t / n, where the
            # delta_t have mean zero and the variance of gamma v(s') given s.
            p, mu, phi, v = chain.transitions, chain.stationary, chain.features, chain.values
            variance = 0.81 * (p @ v**2 - (p @ v) ** 2)
            inverse = np.linalg.inv(phi.T @ (mu[:, None] * (phi - 0.9 * p @ phi)))
            covariance = inverse @ (phi.T @ ((mu * variance)[:, None] * phi)) @ inverse.T / n
            surprise.append(error / np.trace(phi.T @ (mu[:, None] * phi) @ covariance))
            assert error < bound * chain.msve(np.zeros(10))
        assert 0.2 < np.mean(surprise) < 3


def test_a_tabular_chain_is_solved_whatever_its_rewards():
    chain = BoyanChain(n_states=8, n_features=12, seed=0)  # more features than states: every value function is linear
    transformer = InContextTransformer(LinearKernel(), gamma=0.9, n_layers=math.inf, ridge=1e-6)
    value = transformer.condition(chain.sample_context(1500, seed=0))
    assert chain.msve(value(chain.features)) / chain.msve(np.zeros(8)) < 0.02
    assert json.dumps(chain.msve(value(chain.features)))  # a plain float

"""The critic benchmark against outside truth: exact restarts, closed forms, NumPy loops, SB3's buffer, and training itself."""

import dataclasses
import json
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from icrl_gym.callbacks import InContextCallback
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import CallbackList

from icrl_gym import InContextActorCriticPolicy
from icrl_gym.cli import main
from icrl_gym.critic_benchmark import CriticBenchmarkConfig, RecordingConfig, RecordingOptions, Setting, record
from icrl_gym.critic_benchmark.recording import LAG, Recorder, Recording
from icrl_gym.critic_benchmark.report import summarize
from icrl_gym.critic_benchmark.scores import critic_values, gae, score_rollout, scores_of
from icrl_gym.critic_benchmark.settings import DEFAULT_SETTINGS, read_settings
from icrl_gym.critic_benchmark.snapshots import capture, require_restorable
from icrl_gym.critic_benchmark.truth import monte_carlo, policy_actor
from icrl_gym.envs import BoyanChain
from icrl_gym.metaworld import make_env
from icrl_gym.train_envs import make_training_env

SMALL = {
    "n_envs": 2, "n_steps": 64, "total_timesteps": 512, "gamma": 0.9, "truth_rollouts": 2, "truth_states": 8,
    "truth_repeats": 4, "truth_horizon": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    return {
        task: Recording.load(record(RecordingConfig(task, **SMALL), folder)) for task in ("Pendulum-v1", "CartPole-v1")
    }


# Snapshots


@pytest.mark.parametrize("task", ["reach-v3", "drawer-close-v3", "door-lock-v3"])
def test_a_restored_meta_world_state_goes_on_exactly_as_the_first_time(task):
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (70, 4)).astype(np.float32)
    env = make_env(task, seed=3)
    env.reset()
    env.reset()  # the second goal, so that the model is not as it was made
    for action in actions[:30]:
        env.step(action)
    snapshot = capture(env)
    expected = [env.step(action)[:3] for action in actions[30:]]
    env.reset()
    other = snapshot.restore(None)
    for lane in (other, other, env):  # a new environment, one that has gone on, and the first one at another goal
        again = snapshot.restore(lane)
        for action, (observation, reward, terminated) in zip(actions[30:], expected, strict=True):
            result = again.step(action)
            np.testing.assert_array_equal(result[0], observation)
            assert result[1:3] == (reward, terminated)


def test_the_clock_is_set_back():
    env = make_env("reach-v3", seed=0, max_episode_steps=3)
    env.reset()
    for _ in range(3):
        truncated = env.step(np.zeros(4, np.float32))[3]
    assert truncated
    again = capture(env).restore(None)
    assert not again.step(np.zeros(4, np.float32))[3]
    pendulum = gym.make("Pendulum-v1", max_episode_steps=2)
    pendulum.reset(seed=0)
    pendulum.step(np.zeros(1, np.float32))
    assert not capture(pendulum).restore(None).step(np.zeros(1, np.float32))[3]


class TwoStates(gym.Env):
    """The next state is the action, the reward is state + 2 action; with ``ends``, the action 1 ends the episode."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, ends=False):
        self.state, self.ends = 0, ends

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = 0
        return np.array([0], np.float32), {}

    def step(self, action):
        reward = self.state + 2 * int(action)
        self.state = int(action)
        return np.array([self.state], np.float32), reward, self.ends and action == 1, False, {}


class Elsewhere(TwoStates):
    """Keeps its state where no copy reaches it."""

    steps = 0

    def step(self, action):
        type(self).steps += 1
        return (np.array([type(self).steps], np.float32), *super().step(action)[1:])


class Uncopied(TwoStates):
    def __deepcopy__(self, memo):
        raise TypeError("a window of the operating system")


def test_environments_that_cannot_come_back_say_so():
    require_restorable(TwoStates())
    require_restorable(gym.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"cannot be restored: the same actions from a copy lead elsewhere"):
        require_restorable(Elsewhere())
    with pytest.raises(ValueError, match=r"copying it fails .TypeError: a window"):
        require_restorable(Uncopied())


# The truth


def test_values_of_two_states_are_the_closed_form():
    gamma, horizon = 0.9, 12
    env = TwoStates()
    env.reset()
    snapshots, actions = [], [0, 1, 1, 0]
    for state in (0, 0, 1, 1):
        env.state = state
        snapshots.append(capture(env))
    fair = lambda observations, noise: (noise[:, 0] > 0).astype(int)  # noqa: E731
    v, q = monte_carlo(
        snapshots, [[0.0], [0.0], [1.0], [1.0]], actions, fair, 1,
        gamma=gamma, horizon=horizon, n_repeats=2, rng=np.random.default_rng(0),
    )  # fmt: skip
    # Of two mirrored repetitions one takes each action, so their mean is exact: a = 1/2 at every step.
    later = sum(gamma**h * 1.5 for h in range(2, horizon))
    value = np.array([0, 0, 1, 1]) + 1 + gamma * 1.5 + later
    action_value = np.array([0, 2, 3, 1]) + gamma * (np.array(actions) + 1) + later
    np.testing.assert_allclose(v.mean(-1), value, rtol=1e-12)
    np.testing.assert_allclose(q.mean(-1), action_value, rtol=1e-12)


def test_a_sum_ends_with_its_episode():
    env = TwoStates(ends=True)
    env.reset()
    v, q = monte_carlo(
        [capture(env)], [[0.0]], [0], lambda observations, noise: np.ones(len(noise), int), 1,
        gamma=0.5, horizon=9, n_repeats=3, rng=np.random.default_rng(0),
    )  # fmt: skip
    np.testing.assert_array_equal(v, [[2.0] * 3])
    np.testing.assert_array_equal(q, [[0.0 + 0.5 * 2.0] * 3])


def test_values_of_a_random_chain_are_its_own():
    chain = BoyanChain(n_states=5, n_features=2, seed=1)
    snapshots, observations = [], []
    for state in range(5):
        observation, _ = chain.reset(seed=state, options={"state": state})
        snapshots.append(capture(chain))
        observations.append(observation)
    horizon = 60
    samples, _ = monte_carlo(
        snapshots, observations, np.zeros(5, int), lambda seen, noise: np.zeros(len(seen), int), 1,
        gamma=chain.gamma, horizon=horizon, n_repeats=60, rng=np.random.default_rng(0),
    )  # fmt: skip
    standard_error = samples.std(-1, ddof=1) / math.sqrt(samples.shape[-1])
    assert (standard_error > 0).all()  # every repetition has noise of its own
    # gamma^60 = 2e-3 of a value is left out.
    np.testing.assert_array_less(np.abs(samples.mean(-1) - chain.values), 4.5 * standard_error + 1e-2)


def test_actions_come_from_the_policy():
    noise = np.random.default_rng(0).standard_normal((4000, 1))
    for task in ("CartPole-v1", "Pendulum-v1"):
        policy = PPO("MlpPolicy", task, n_steps=64, seed=0).policy
        observation = np.full((1, policy.observation_space.shape[0]), 0.3, np.float32)
        actor, n_noise = policy_actor(policy, lambda states: states)
        actions = actor(np.repeat(observation, len(noise), 0), noise[:, :n_noise])
        with torch.no_grad():
            distribution = policy.get_distribution(torch.as_tensor(observation)).distribution
        if task == "CartPole-v1":
            assert np.mean(actions == 1) == pytest.approx(float(distribution.probs[0, 1]), abs=0.03)
            assert all(policy.action_space.contains(action) for action in actions[:3])
        else:
            expected = np.clip(float(distribution.mean) + float(distribution.stddev) * noise, -2, 2)
            np.testing.assert_allclose(actions, expected, rtol=1e-5)


# Recordings


def test_a_recording_is_what_happened(recordings):
    for task, recording in recordings.items():
        n = recording.config.n_steps
        assert recording.states.shape[:2] == (256, 2)
        assert recording.config.chosen == [1, 3]
        going = ~recording.ends[:-1]
        np.testing.assert_array_equal(recording.states[1:][going], recording.next_states[:-1][going])
        assert recording.terminated.any() == (task == "CartPole-v1")
        assert recording.truncated.any() == (task == "Pendulum-v1")
        assert len(recording.seen_last) == recording.ends.sum()
        for k in range(4):
            # The statistics of a rollout's start are those that its first observation was normalized with.
            np.testing.assert_array_equal(recording.view(k).states(recording.states[k * n]), recording.seen[k * n])
        assert recording.values.shape == recording.action_values.shape == (2, 8, 4)


def test_measured_action_values_start_with_the_action_that_was_taken(tmp_path):
    config = RecordingConfig("Pendulum-v1", **{**SMALL, "truth_horizon": 1})
    recording = Recording.load(record(config, tmp_path))
    for index, k in enumerate(recording.rollouts):
        rewards = recording.rewards[recording.rollout(int(k))][recording.steps[index], recording.envs[index]]
        np.testing.assert_allclose(recording.action_values[index], np.repeat(rewards[:, None], 4, 1), rtol=1e-5)


def test_a_finished_recording_is_kept(tmp_path):
    config = RecordingConfig("CartPole-v1", **SMALL)
    file = record(config, tmp_path)
    before = file.stat().st_mtime_ns
    assert record(config, tmp_path) == file
    assert file.stat().st_mtime_ns == before
    assert record(dataclasses.replace(config, truth_horizon=11), tmp_path) != file
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a recording of this version"):
        Recording.load(file)


# Scores


def test_values_and_advantages_are_those_of_training():
    """PPO trained with the in-context critic has, in its buffer, what the benchmark makes of the recording alone."""
    config = RecordingConfig("Pendulum-v1", **{**SMALL, "n_steps": 128, "total_timesteps": 1024, "truth_horizon": 2})
    training = config.training()
    env = make_training_env(training)
    recorder = Recorder(config)
    model = PPO(
        InContextActorCriticPolicy,
        env,
        n_steps=128,
        batch_size=64,
        n_epochs=1,
        gamma=config.gamma,
        seed=0,
        device="cpu",
    )
    model.learn(config.total_timesteps, callback=CallbackList([InContextCallback(cross_fit=False), recorder]))
    recording = recorder.recording()
    assert recording.truncated.any()
    setting = Setting("as in training", window=config.n_rollouts)
    for k in range(1, config.n_rollouts):
        values, next_values, offsets = critic_values(recording, k, setting)
        np.testing.assert_allclose(values, recording.learned_values[recording.rollout(k)], rtol=2e-4, atol=2e-4)
        assert np.abs(offsets).max() > 0
        advantages = gae(recording, k, values - offsets, next_values - offsets)
        # The callback has subtracted their mean.
        np.testing.assert_allclose(
            advantages - advantages.mean(),
            recording.learned_advantages[recording.rollout(k)],
            rtol=1e-3,
            atol=1e-3,
        )


def test_advantages_are_those_of_sb3(recordings):
    rng = np.random.default_rng(0)
    recording, k, n = recordings["CartPole-v1"], 2, SMALL["n_steps"]
    terminated = rng.random(recording.terminated.shape) < 0.05
    truncated = ~terminated & (rng.random(terminated.shape) < 0.05)
    recording = dataclasses.replace(recording, terminated=terminated, truncated=truncated)
    rows = recording.rollout(k)
    values, last = rng.standard_normal((n, 2)), rng.standard_normal((n, 2))
    next_values = np.where(recording.ends[rows], last, np.vstack([values[1:], last[-1:]]))
    config = recording.config
    buffer = RolloutBuffer(
        n,
        gym.spaces.Box(-1, 1, (1,)),
        gym.spaces.Discrete(2),
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        n_envs=2,
    )
    starts = np.ones(2, bool)
    for t in range(n):
        # As SB3's collect_rollouts: what follows a time limit is added to the reward.
        reward = recording.seen_rewards[rows][t] + config.gamma * last[t] * truncated[rows][t]
        buffer.add(np.zeros((2, 1)), np.zeros((2, 1)), reward, starts, torch.as_tensor(values[t]), torch.zeros(2))
        starts = recording.ends[rows][t]
    buffer.compute_returns_and_advantage(torch.as_tensor(next_values[-1], dtype=torch.float32), starts)
    np.testing.assert_allclose(gae(recording, k, values, next_values), buffer.advantages, rtol=1e-4, atol=1e-5)


def test_scores_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    v, truth, advantages, true_advantages = rng.standard_normal((4, 12))
    pairs = np.array([[0, 3], [4, 1], [6, 7], [2, 9]])
    scores = scores_of(v, advantages, truth, true_advantages, pairs)
    best = min(np.mean([(a - c - b) ** 2 for a, b in zip(v, truth, strict=True)]) for c in np.linspace(-3, 3, 60001))
    assert scores["error"] == pytest.approx(math.sqrt(best) / truth.std(), rel=1e-6)
    fit = np.polyfit(v, truth, 1)
    assert scores["error_scaled"] == pytest.approx(np.std(truth - np.polyval(fit, v)) / truth.std())
    assert scores["value"] == pytest.approx(np.corrcoef(v, truth)[0, 1])
    assert scores["advantage"] == pytest.approx(np.corrcoef(advantages, true_advantages)[0, 1])
    differences = [[x[j] - x[i] for i, j in pairs] for x in (v, truth)]
    assert scores["difference"] == pytest.approx(np.corrcoef(differences)[0, 1])
    zero = scores_of(np.zeros(12), advantages, truth, true_advantages, pairs)
    assert math.isnan(zero["value"]) and math.isnan(zero["difference"])
    assert zero["error"] == zero["error_scaled"] == 1.0
    assert math.isnan(scores_of(v, advantages, np.ones(12), np.ones(12), pairs)["error"])


def test_a_critic_that_knows_the_truth_scores_one(recordings):
    recording = recordings["Pendulum-v1"]
    truth = recording.values[1].mean(-1)
    rows, at = recording.rollout(3), (recording.steps[1], recording.envs[1])
    learned = recording.learned_values.copy()
    learned[rows][at] = truth / recording.reward_scale(3) + 5.0
    advantages = recording.learned_advantages.astype(float)
    advantages[rows][at] = (recording.action_values - recording.values)[1].mean(-1)
    scores = score_rollout(
        dataclasses.replace(recording, learned_values=learned.astype(float), learned_advantages=advantages),
        1,
        "learned",
    )
    assert scores["value"] == pytest.approx(1.0)
    assert scores["difference"] == pytest.approx(1.0)
    assert scores["advantage"] == pytest.approx(1.0)
    assert scores["error"] == pytest.approx(0.0, abs=1e-5)


def test_cross_fitted_values_have_not_seen_their_own_rollout(recordings):
    recording, k = recordings["Pendulum-v1"], 2
    setting = Setting("crossed", context="cross_fitted", window=1)
    rows = recording.rollout(k)
    frozen = critic_values(recording, k, dataclasses.replace(setting, context="frozen"))[0]
    before = critic_values(recording, k, setting)[0]
    rewards = recording.rewards.copy()
    rewards[rows, 0] += np.linspace(0, 5, len(rewards[rows]))
    moved = dataclasses.replace(recording, rewards=rewards)
    after = critic_values(moved, k, setting)[0]
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    assert np.abs(after[:, 1] - before[:, 1]).max() > 1e-3
    np.testing.assert_array_equal(critic_values(moved, k, dataclasses.replace(setting, context="frozen"))[0], frozen)


def test_pairs_are_of_one_episode(recordings):
    from icrl_gym.critic_benchmark.scores import _pairs

    for recording in recordings.values():
        for index, k in enumerate(recording.rollouts):
            ends = recording.ends[recording.rollout(int(k))]
            steps, envs = recording.steps[index], recording.envs[index]
            for i, j in _pairs(recording, index):
                assert envs[i] == envs[j] and steps[j] == steps[i] + LAG
                assert not ends[steps[i] : steps[j], envs[i]].any()


def test_a_critic_that_diverges_counts_as_zero(recordings):
    setting = Setting(
        "diverges", {"n_layers": 60, "step_sizes": 1e6, "step_normalization": "none", "n_landmarks": None}
    )
    scores = score_rollout(recordings["Pendulum-v1"], 1, setting)
    assert scores["failed"] == 1.0
    assert scores["value"] == scores["advantage"] == scores["difference"] == 0.0


def test_the_summary_is_sorted_and_paired():
    def rows(*advantages):
        return [
            {"value": 0.5, "error": 1.0, "error_scaled": 1.0, "difference": math.nan, "advantage": a, "failed": 0.0, "seconds": 1.0}
            for a in advantages
        ]  # fmt: skip

    table = summarize(
        {
            "truth": {"a": rows(0.1, 0.1), "b": rows(0.1)},
            "learned": {"a": rows(0.1, 0.3), "b": rows(0.5)},
            "better": {"a": rows(0.2, 0.4), "b": rows(0.6)},
        }
    )
    assert [(row["setting"], row["task"]) for row in table[::3]] == [
        ("truth", "all"),
        ("better", "all"),
        ("learned", "all"),
    ]
    better = table[3]
    assert better["advantage"] == pytest.approx((0.3 + 0.6) / 2)  # tasks count alike
    assert better["over_learned"] == pytest.approx(0.1)
    assert better["over_learned_low"] == pytest.approx(0.1)
    assert math.isnan(better["difference"])


# Settings and the command


def test_the_default_settings_can_be_built_and_written_as_json(tmp_path):
    names = [setting.name for setting in DEFAULT_SETTINGS]
    assert len(set(names)) == len(names)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps([dataclasses.asdict(setting) for setting in DEFAULT_SETTINGS]))
    assert read_settings(file) == list(DEFAULT_SETTINGS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is not JSON"),
        ("{}", "must hold a list of objects"),
        ('[{"critic": {}}]', "name is missing"),
        ('[{"name": "a", "kernel": "rbf"}]', "'kernel' is none of them"),
        ('[{"name": "a"}, {"name": "a"}]', "'a' is there twice"),
        ('[{"name": "learned"}]', "always scored"),
        ('[{"name": "a", "window": 0}]', "window must be a positive number"),
        ('[{"name": "a", "context": "all"}]', "context must be one of"),
        ('[{"name": "a", "window": "8"}]', "window must be a number"),
        ('[{"name": "a", "critic": []}]', "critic must be an object"),
        ('[{"name": "a", "critic": {"kernel": "cubic"}}]', "setting 'a': .*cubic"),
        ('[{"name": "a", "critic": {"depth": 3}}]', "setting 'a': .*depth"),
        ('[{"name": "a", "adaptive": {}, "critic": {"kernel": "rbf"}}]', "standardize alone"),
    ],
)
def test_wrong_settings_say_what_is_wrong(tmp_path, text, message):
    file = tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_timesteps": 100}, "one rollout"),
        ({"truth_states": 7}, "must be even"),
        ({"truth_states": 1000}, "at most 96"),
        ({"n_steps": 20}, "--n-steps must be at least 32"),
        ({"gamma": 1.5}, "--gamma must lie in"),
        ({"task": "reach-v3", "truth_horizon": 501}, "--truth-horizon must be at most 500"),
        ({"task": "no-such-task"}, "no-such-task"),
        ({"task": "FrozenLake-v1"}, "one-dimensional Box"),
    ],
)
def test_what_cannot_be_recorded_says_so(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        record(RecordingConfig(**{"task": "Pendulum-v1", **SMALL, **options}), tmp_path)


def test_the_command_scores_and_goes_on_from_what_is_there(tmp_path, capsys):
    settings = tmp_path / "settings.json"
    settings.write_text(
        '[{"name": "two", "window": 2}, {"name": "rbf", "critic": {"kernel": "rbf", "n_landmarks": 64}}]'
    )
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out = tmp_path / "out"
    command = ["benchmark", "critic", "--tasks", "CartPole-v1", "Pendulum-v1", *small, "--jobs", "1", "--out", str(out)]
    assert main([*command, "--settings", str(settings)]) == 0
    said = capsys.readouterr().out
    assert "2 recordings, 0 known, 2 to make" in said
    assert "10 cells, 0 known, 10 to compute" in said
    page = (out / "scores.md").read_text()
    assert "## Advantage, by task" in page
    for name in ("truth", "learned", "zero", "two", "rbf"):
        assert f"| {name} |" in page
    assert len((out / "scores.csv").read_text().splitlines()) == 1 + 5 * 3
    assert (out / "scores.png").stat().st_size > 1000
    settings.write_text('[{"name": "two", "window": 2}, {"name": "one", "window": 1}]')
    assert main([*command, "--settings", str(settings)]) == 0
    said = capsys.readouterr().out
    assert "2 recordings, 2 known, 0 to make" in said
    assert "10 cells, 8 known, 2 to compute" in said
    assert main([*command, "--settings", str(tmp_path / "none.json")]) == 2
    assert main([*command, "--truth-states", "3"]) == 2
    assert "--truth-states must be even" in capsys.readouterr().err


def test_the_other_benchmark_is_still_there(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["benchmark", "--help"])
    assert stopped.value.code == 0
    assert "--critics" in capsys.readouterr().out


def test_options_are_shared_and_a_recording_keeps_its_name():
    config = CriticBenchmarkConfig(tasks=("reach-v3",), seeds=2, gamma=0.9, truth_states=8)
    for seed, one in enumerate(config.recordings()):
        assert one == RecordingConfig("reach-v3", seed, gamma=0.9, truth_states=8)
        assert all(getattr(one, f.name) == getattr(config, f.name) for f in dataclasses.fields(RecordingOptions))
    # Recordings take minutes to make: another order of the settings must not lose those that are there.
    assert CriticBenchmarkConfig().recordings()[0].file_name == "reach-v3-seed0-93b75b1e.npz"

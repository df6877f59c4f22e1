"""What reaches TensorBoard, when, and that nothing that is not finite stops a run."""

import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from icrl_gym.callbacks import AdvantageCenteringCallback, InContextCallback, TDErrorCallback
from icrl_gym.callbacks.td_error import effective_rank
from icrl_gym.wrappers import RollingContext
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from icrl_gym import InContextActorCriticPolicy


class Walk(gym.Env):
    """A random walk that pays what an override says; ends by a time limit, and sometimes terminates."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, length=10, bad=None, reward=None):
        self.length, self.bad, self.fixed, self.total = length, bad or {}, reward, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, np.zeros(3, np.float32)
        return self.x.copy(), {}

    def step(self, action):
        self.t, self.total = self.t + 1, self.total + 1
        self.x = (0.9 * self.x + 0.3 * self.np_random.normal(size=3)).astype(np.float32)
        observation, reward = self.x.copy(), float(self.x.sum()) if self.fixed is None else self.fixed
        if self.total in self.bad:
            what, value = self.bad[self.total]
            if what == "observation":
                observation[1] = value
            else:
                reward = value
        return observation, reward, bool(self.x[0] > 0.4), self.t >= self.length, {}


def env(n=1, **options):
    return DummyVecEnv([lambda: Monitor(RollingContext(Walk(**options), length=256)) for _ in range(n)])


def make_model(vec, algorithm=PPO, critic=None, **options):
    options = {"n_steps": 25, "gamma": 0.9, "seed": 0, "device": "cpu", **options}
    if algorithm is PPO:
        options = {"batch_size": options["n_steps"], "n_epochs": 2, **options}
    return algorithm(InContextActorCriticPolicy, vec, policy_kwargs={"critic_kwargs": critic or {}}, **options)


def events(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()
    return accumulator


def finite_parameters(model):
    return all(bool(torch.isfinite(p).all()) for p in model.policy.parameters())


@pytest.mark.parametrize("critic", [{}, {"kernel": "rbf", "n_layers": 12, "n_landmarks": None}])
def test_every_quantity_is_logged_once_a_rollout_at_num_timesteps(tmp_path, critic):
    model = make_model(env(4), critic=critic)
    model.set_logger(configure(str(tmp_path), ["tensorboard"]))
    model.learn(400, callback=InContextCallback())
    board = events(tmp_path)
    ours = [
        t
        for t in board.Tags()["scalars"]
        if t.split("/")[0] in ("td_error", "td_error_by_depth", "critic", "centering")
    ]
    expected = {
        *(f"td_error/{where}_{what}" for where in ("rollout", "context") for what in ("rms", "mean", "max")),
        "td_error/n_nonfinite", "critic/offset", "critic/context_fill", "critic/context_size", "critic/effective_rank",
        "critic/explained_variance", "critic/n_refused", "centering/mean", "centering/rms", "td_error_by_depth/000",
    }  # fmt: skip
    assert expected <= set(ours)
    assert len(ours) < 30
    for tag in ours:
        steps = [e.step for e in board.Scalars(tag)]
        first = (
            200
            if tag.startswith(("td_error/context_", "td_error_by_depth", "critic/effective_rank")) and steps[0] == 200
            else 100
        )
        assert steps == list(range(first, 401, 100)), tag
        assert all(math.isfinite(e.value) for e in board.Scalars(tag))
    depth = {t: board.Scalars(t)[-1].value for t in ours if t.startswith("td_error_by_depth/")}
    assert len(depth) >= 5
    assert ("td_error_by_depth/fixed_point" in depth) == (not critic)
    assert board.Tags()["images"] == ["td_error/by_depth"]
    assert any("custom_scalars" in tag for tag in board.Tags()["tensors"])


def test_td_errors_are_those_of_the_environment():
    class Recorder(Walk):
        log: list = []  # noqa: RUF012

        def step(self, action):
            before, out = self.x.copy(), super().step(action)
            self.log.append((before, out[1], out[0], out[2]))
            return out

    Recorder.log = []
    vec = DummyVecEnv([lambda: RollingContext(Recorder(), length=256)])
    model = make_model(vec)
    callback = InContextCallback()
    model.learn(50, callback=callback)
    critic = model.policy.critic
    states, rewards, next_states, terminated = (np.array(x) for x in zip(*Recorder.log[-25:], strict=True))
    assert terminated.any()

    def v(s):
        return critic(torch.as_tensor(s, dtype=torch.float64)).numpy().ravel() - float(critic.offset)

    by_hand = rewards + 0.9 * ~terminated * v(next_states) - v(states)
    logged = callback.td_error.rollout_td_errors().ravel()
    np.testing.assert_allclose(logged, by_hand, atol=1e-5)
    # The wrong way: the rewards that SB3 rewrote, taken with one more bootstrap at the time limit.
    assert abs(float(critic.offset)) > 1e-3


def test_intervals_are_in_environment_steps_and_go_on_over_learn_calls(tmp_path):
    model = make_model(env(4))
    model.set_logger(configure(str(tmp_path), ["tensorboard"]))
    callback = InContextCallback(log_interval=100)
    model.learn(800, callback=callback)
    model.learn(400, callback=callback, reset_num_timesteps=False)
    assert [e.step for e in events(tmp_path).Scalars("td_error/rollout_rms")] == list(range(100, 1201, 100))


def test_a_longer_interval_logs_less_often(tmp_path):
    model = make_model(env(4))
    model.set_logger(configure(str(tmp_path), ["tensorboard"]))
    model.learn(800, callback=InContextCallback(log_interval=400))
    assert [e.step for e in events(tmp_path).Scalars("td_error/rollout_rms")] == [100, 400, 800]


def test_several_rollouts_between_two_dumps_are_aggregated(tmp_path):
    model = make_model(env(2), A2C, n_steps=5)
    model.set_logger(configure(str(tmp_path), ["tensorboard"]))
    collected = []

    class Recording(TDErrorCallback):
        def _on_rollout_end(self):
            collected.append((self.num_timesteps, self.rollout_td_errors().ravel()))
            super()._on_rollout_end()

    callback = InContextCallback()
    callback.callbacks[-1] = Recording()
    model.learn(200, callback=callback, log_interval=10)
    points = events(tmp_path).Scalars("td_error/rollout_rms")
    assert [p.step for p in points] == [100, 200]
    for point in points:
        errors = np.concatenate([e for step, e in collected if point.step - 100 < step <= point.step])
        assert point.value == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-5)


# Four transitions and fewer.
@pytest.mark.filterwarnings("ignore:the critic has no plausible fixed point:RuntimeWarning")
# SB3's own sums over the infinite reward, which are put right afterwards.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_and_infinity_are_counted_and_stop_nothing(tmp_path):
    bad = {7: ("observation", np.nan), 12: ("reward", np.inf)}
    model = make_model(env(bad=bad), n_steps=20)
    model.set_logger(configure(str(tmp_path), ["tensorboard"]))
    values = []
    forward = model.policy.forward

    def recording(obs, *args, **kwargs):
        out = forward(obs, *args, **kwargs)
        values.append(out[1])
        return out

    model.policy.forward = recording
    with pytest.warns(RuntimeWarning, match="left out of the context"):
        model.learn(60, callback=InContextCallback())
    assert torch.isfinite(torch.cat(values)).all()
    assert finite_parameters(model)
    board = events(tmp_path)
    assert board.Scalars("critic/n_refused")[-1].value == 2
    assert board.Scalars("td_error/rollout_rms")[0].value < 1e3
    assert all(np.isfinite(e.value) for t in ("td_error/rollout_rms", "centering/rms") for e in board.Scalars(t))


def test_a_huge_reward_is_data(tmp_path):
    model = make_model(env(bad={12: ("reward", 1e30)}), n_steps=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SB3's own float32 returns overflow when it squares them
        model.learn(60, callback=InContextCallback())
    assert finite_parameters(model)
    assert torch.isfinite(model.policy.critic(torch.zeros(1, 3))).all()


# Four transitions and fewer.
@pytest.mark.filterwarnings("ignore:the critic has no plausible fixed point:RuntimeWarning")
@pytest.mark.parametrize("options", [{"n_steps": 9, "batch_size": 8}, {"n_steps": 2, "batch_size": 2, "n_epochs": 20}])
def test_tiny_and_left_over_minibatches(options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You have specified a mini-batch size", UserWarning)
        model = make_model(env(reward=1.0), **options)
    model.learn(54, callback=InContextCallback())
    assert finite_parameters(model)


def test_all_options_at_once_are_quiet(capsys):
    model = make_model(env(12), verbose=1)
    model.learn(600, callback=InContextCallback(verbose=1))
    out = capsys.readouterr().out
    assert "value is zero in the first rollout" in out and out.count("value is zero") == 1
    assert "td_error_by_depth/" in out


def test_what_centering_removed_is_reported(tmp_path):
    results = {}
    for offset in ("centered", "removed"):
        model = make_model(env(reward=3.0), critic={"offset": offset, "kernel": "rbf", "value_shift": False})
        folder = tmp_path / offset
        model.set_logger(configure(str(folder), ["tensorboard"]))
        model.learn(75, callback=InContextCallback())
        board = events(folder)
        results[offset] = [board.Scalars(t)[-1].value for t in ("critic/offset", "centering/rms")]
    assert abs(results["centered"][0]) > 1.0 and results["removed"][0] == 0.0
    assert results["centered"][1] != pytest.approx(results["removed"][1], rel=1e-3)


def test_the_effective_rank_of_known_matrices():
    model = make_model(env(), critic={"kernel": "rbf", "temperature": 1e-6, "standardize": False})
    model.learn(50, callback=InContextCallback())
    critic = model.policy.critic
    # Nearly a block of ones for each distinct state (a reset gives the same one again), whose eigenvalue is its size.
    share = torch.unique(critic.centers, dim=0, return_counts=True)[1] / critic.centers.shape[-2]
    assert effective_rank(critic) == pytest.approx(float(torch.special.entr(share).sum().exp()), rel=1e-3)
    model = make_model(env(), critic={"kernel": "rbf", "temperature": 1e9})
    model.learn(50, callback=InContextCallback())
    assert effective_rank(model.policy.critic) == pytest.approx(1.0, abs=1e-3)  # nearly all ones


def test_the_parts_work_by_themselves():
    model = make_model(env())
    callbacks = InContextCallback(monitor=False)
    assert not any(isinstance(c, TDErrorCallback) for c in callbacks.callbacks)
    model.learn(50, callback=callbacks)
    assert any(isinstance(c, AdvantageCenteringCallback) for c in callbacks.callbacks)


def test_intervals_must_be_positive():
    with pytest.raises(ValueError, match="log_interval must be at least 1"):
        TDErrorCallback(log_interval=0)

"""When the critic is conditioned, on what, and that nothing between the recorder and the algorithm goes unnoticed."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from icrl_gym.callbacks import ContextSyncCallback, InContextCallback
from icrl_gym.wrappers import RollingContext
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from icrl_gym import Context, InContextActorCriticPolicy


class Drift(gym.Env):
    """A noisy walk that pays its position; ends by a time limit, and sometimes terminates."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, origin=0.0, dtype=np.float32):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), dtype)
        self.origin, self.dtype = origin, dtype

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, np.zeros(2)
        return (self.origin + self.x).astype(self.dtype), {}

    def step(self, action):
        self.t += 1
        self.x = 0.8 * self.x + 0.5 * self.np_random.normal(size=2)
        return (self.origin + self.x).astype(self.dtype), float(self.x[0]), bool(self.x[1] > 0.9), self.t >= 9, {}


def make_env(n=2, length=128, on_reset="keep", **options):
    return DummyVecEnv([lambda: RollingContext(Drift(**options), length, on_reset) for _ in range(n)])


def make_env_of(cls):
    return DummyVecEnv([lambda: RollingContext(cls(), 128)])


def make_model(env, critic=None, **options):
    options = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "gamma": 0.9, "seed": 0, "device": "cpu", **options}
    return PPO(InContextActorCriticPolicy, env, policy_kwargs={"critic_kwargs": critic or {}}, **options)


class InTurn(ContextSyncCallback):
    """Evaluates when a rollout starts, never beside the update."""

    def _on_training_start(self):
        self._worker = None


@pytest.mark.parametrize("normalize", [False, True])
def test_evaluating_beside_the_update_changes_nothing(normalize):
    def parameters(sync):
        env = make_env()
        model = make_model(VecNormalize(env, gamma=0.9) if normalize else env)
        callback = InContextCallback(cross_fit=False)  # which reads from its own sync
        callback.callbacks[0] = sync
        model.learn(320, callback=callback)
        return model.policy.state_dict()

    one, other = parameters(ContextSyncCallback()), parameters(InTurn())
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_most_rollouts_take_over_what_was_evaluated_beside_the_update():
    model = make_model(make_env())
    conditioned = []
    condition = model.policy.critic.condition
    model.policy.critic.condition = lambda context: (conditioned.append(len(context)), condition(context))[1]
    model.learn(320, callback=InContextCallback())
    assert conditioned == [0]  # the first one only


class AtRolloutStart(BaseCallback):
    """Does something to the model when its third rollout starts."""

    def __init__(self, what):
        super().__init__()
        self.what, self.rollouts = what, 0

    def _on_rollout_start(self):
        self.rollouts += 1
        if self.rollouts == 3:
            self.what(self.model)

    def _on_step(self):
        return True


def test_a_context_that_is_loaded_between_rollouts_counts():
    loaded = Context(np.full((5, 2), 3.0), np.ones(5), np.full((5, 2), 3.0), np.ones(5, bool))
    seen = []

    def look(model):
        seen.append(int(model.policy.critic.context.mask.sum()))

    model = make_model(make_env(n=1), n_steps=32, batch_size=32)
    load = AtRolloutStart(lambda model: model.get_env().env_method("load_context", loaded))
    model.learn(96, callback=CallbackList([load, InContextCallback(), AtRolloutStart(look)]))
    assert seen == [5]


def test_statistics_that_change_between_rollouts_count():
    seen = []

    def change(model):
        # A plain observation of 0 stays itself, whatever divides it.
        model.get_vec_normalize_env().ret_rms.var = np.array(1e4)

    def look(model):
        seen.append(float(model.policy.critic.context.rewards.abs().max()))

    model = make_model(VecNormalize(make_env(n=1), norm_obs=False, gamma=0.9))
    model.learn(96, callback=CallbackList([AtRolloutStart(change), InContextCallback(), AtRolloutStart(look)]))
    assert 0 < seen[0] < 0.1


def test_layers_that_diverge_beside_the_update_stop_the_run_with_their_message():
    critic = {"kernel": "exponential", "temperature": 0.01, "n_layers": 50, "step_normalization": "none"}
    model = make_model(make_env(), critic={**critic, "step_sizes": 10.0, "n_landmarks": None})
    with pytest.raises(FloatingPointError, match="row_sum"):
        model.learn(320, callback=InContextCallback())


class Reshaped(VecEnvWrapper):
    """A vector layer outside of RollingContext that changes rewards or ends."""

    def __init__(self, venv, what):
        super().__init__(venv)
        self.what = what

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        if self.what == "rewards":
            return observations, 10 * rewards, dones, infos
        for info in infos:
            if self.what == "ends of episodes" and info.get("TimeLimit.truncated"):
                info["TimeLimit.truncated"] = False
        return observations, rewards, dones, infos


@pytest.mark.parametrize("what", ["rewards", "ends of episodes"])
def test_a_layer_that_changes_what_was_recorded_says_so(what):
    with pytest.raises(ValueError, match=f"Something outside RollingContext changes {what}.*Reshaped of DummyVecEnv"):
        make_model(Reshaped(make_env(), what)).learn(96, callback=InContextCallback())
    make_model(Reshaped(make_env(), "nothing")).learn(96, callback=InContextCallback())


def test_rewards_normalized_twice_say_so():
    env = VecNormalize(VecNormalize(make_env(), norm_obs=False, gamma=0.9), norm_obs=False, gamma=0.9)
    with pytest.raises(ValueError, match="changes rewards"):
        make_model(env).learn(96, callback=InContextCallback())


def test_an_evaluation_on_the_training_environment_says_so():
    model = make_model(make_env(n=1))
    model.learn(64, callback=InContextCallback())
    evaluate_policy(model, model.get_env(), n_eval_episodes=2, warn=False)
    with pytest.raises(ValueError, match="give evaluate_policy and the like one of their own"):
        model.learn(64, callback=InContextCallback(), reset_num_timesteps=False)


def test_contexts_that_are_always_empty_say_so():
    class Endless(Drift):
        def step(self, action):
            observation, reward, _, _, info = super().step(action)
            return observation, reward, False, self.t >= 8, info

    env = DummyVecEnv([lambda: RollingContext(Endless(), 64, "clear")])
    with pytest.warns(UserWarning, match="contexts of all environments are empty"):
        make_model(env).learn(96, callback=InContextCallback())


@pytest.mark.parametrize("origin", [1e6, 1e12])
def test_observations_far_from_the_origin_are_compared_as_the_policy_reads_them(origin):
    model = make_model(make_env(n=1, origin=origin, dtype=np.float64)).learn(96, callback=InContextCallback())
    critic, context = model.policy.critic, model.get_env().env_method("context_snapshot")[0].context
    # The states of the context, asked for as observations, have the values of the context's own system.
    newest = context[-96:-32]  # what the last rollout was conditioned on
    asked = model.policy.predict_values(newest.states.float()).double().squeeze(-1)
    expected = critic.value_function(critic.context.states) + critic.offset
    torch.testing.assert_close(asked, expected, rtol=1e-5, atol=1e-5)


def test_a_reward_that_float32_cannot_hold_is_no_transition():
    class Jackpot(Drift):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, 1e39 if self.t == 5 else reward, *rest

    with np.errstate(all="ignore"):
        model = make_model(DummyVecEnv([lambda: RollingContext(Jackpot(), 64)]))
        model.learn(96, callback=InContextCallback())
    assert 0 < int(model.policy.critic.context.mask.sum()) < 64
    assert all(bool(torch.isfinite(p).all()) for p in model.policy.parameters())


def test_a_reward_that_float32_cannot_hold_says_so_where_it_is_compared():
    class Jackpots(Drift):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 1e39 if self.t > 2 else 0.0, *rest

    with (
        np.errstate(all="ignore"),
        pytest.raises(ValueError, match=r"reward of 1e\+39 does not fit into float32.*TransformR"),
    ):
        make_model(make_env_of(Jackpots)).learn(32, callback=InContextCallback())


class Interrupted(BaseCallback):
    """Ctrl-C in the middle of the second rollout."""

    def _on_step(self):
        if self.num_timesteps >= 96:
            raise KeyboardInterrupt
        return True


def test_after_an_interrupted_rollout_the_critic_counts_as_unsynced():
    model = make_model(make_env())
    with pytest.raises(KeyboardInterrupt):
        model.learn(640, callback=CallbackList([InContextCallback(), Interrupted()]))
    with pytest.raises(RuntimeError, match="InContextCallback"):
        model.learn(64)  # the values would be those of a context that nothing keeps
    assert model.learn(64, callback=InContextCallback()).num_timesteps == 64


def test_one_callback_serves_several_models(tmp_path):
    callback = InContextCallback(log_interval=64)
    for name in ("one", "two"):
        model = make_model(make_env(n=1))
        model.set_logger(configure(str(tmp_path / name), ["tensorboard"]))
        model.learn(192, callback=callback)
        events = EventAccumulator(str(tmp_path / name)).Reload()
        assert [e.step for e in events.Scalars("td_error/rollout_rms")] == [32, 64, 128, 192]

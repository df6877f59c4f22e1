"""The critic inside Stable-Baselines3: one pure value function for collecting and updating, no parameter, save and load."""

import copy
import math
import sys

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from icrl_gym.callbacks import InContextCallback, TDErrorCallback
from icrl_gym.wrappers import RollingContext
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from icrl_gym import Context, InContextActorCriticPolicy, InContextCritic
from icrl_gym.adaptive import AdaptiveTransformer
from icrl_gym.kernels import LinearKernel, RBFKernel

# The processes of SubprocVecEnv cannot import a test module by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Steps(gym.Env):
    """obs = [step, episode, tag]; a reward that is constant, or grows within an episode; ends after `length` steps."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    observation_space = gym.spaces.Box(-1e3, 1e3, (3,), np.float64)

    def __init__(self, length=5, how="truncated", tag=0.0, reward=1.0, growth=0.0):
        self.length, self.how, self.tag, self.reward, self.growth = length, how, tag, reward, growth
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observation(), {}

    def observation(self):
        return np.array([self.t, self.episode, self.tag])

    def step(self, action):
        self.t += 1
        end = self.t >= self.length
        reward = self.reward * (1 + self.growth * self.t)
        return self.observation(), reward, end and self.how == "terminated", end and self.how == "truncated", {}


class Space(gym.Env):
    """Random observations of any space."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, observation_space):
        self.observation_space = observation_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action), False, bool(self.np_random.random() < 0.2), {}


def steps_env(**options):
    return lambda: RollingContext(Monitor(Steps(**options)), length=64)


def make_model(env, algorithm=PPO, critic=None, **options):
    options = {"n_steps": 16, "batch_size": 8, "n_epochs": 2, "gamma": 0.9, "seed": 0, "device": "cpu", **options}
    if algorithm is A2C:
        del options["batch_size"], options["n_epochs"]
    return algorithm(InContextActorCriticPolicy, env, policy_kwargs={"critic_kwargs": critic or {}}, **options)


def values(model, observations):
    with torch.no_grad():
        return model.policy.predict_values(model.policy.obs_to_tensor(observations)[0]).flatten().cpu().numpy()


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize("critic", [{}, {"kernel": "rbf", "n_layers": 15, "n_landmarks": None}])
def test_the_update_sees_the_values_of_the_rollout(algorithm, critic):
    model = make_model(DummyVecEnv([steps_env(length=7, tag=i, growth=0.5) for i in range(2)]), algorithm, critic)
    seen, bad, evaluated = {}, [], 0
    forward, evaluate = model.policy.forward, model.policy.evaluate_actions

    def recording_forward(obs, *args, **kwargs):
        out = forward(obs, *args, **kwargs)
        np.testing.assert_array_equal(out[1], model.policy.predict_values(obs))
        seen.update({tuple(o): float(v) for o, v in zip(obs.tolist(), out[1].flatten(), strict=True)})
        return out

    def checking_evaluate(obs, actions):
        nonlocal evaluated
        out = evaluate(obs, actions)
        assert not out[0].requires_grad
        evaluated += len(obs)
        for o, v in zip(obs.tolist(), out[0].flatten(), strict=True):
            if abs(seen[tuple(o)] - float(v)) > 1e-5:
                bad.append(o)
        return out

    model.policy.forward, model.policy.evaluate_actions = recording_forward, checking_evaluate
    model.learn(96, callback=InContextCallback())
    assert not bad and evaluated >= 96
    assert len(set(seen.values())) > 10  # not all zero


def test_no_parameter_of_the_critic_exists():
    model = make_model(DummyVecEnv([steps_env()]))
    names = [name for name, _ in model.policy.named_parameters()]
    assert names and not any("value" in name or "critic" in name for name in names)
    optimized = {id(p) for group in model.policy.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in model.policy.parameters()}
    assert not list(model.policy.critic.parameters())
    assert any(name.startswith("value_net.coefficients") for name in model.policy.state_dict())
    before = model.policy.critic.transformer.state_dict()
    model.learn(64, callback=InContextCallback())
    for name, value in model.policy.critic.transformer.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_fused_adam_takes_the_steps_of_the_slow_one(tmp_path):
    def trained(**options):
        torch.manual_seed(0)
        env = RollingContext(gym.make("Pendulum-v1"), length=256)
        model = PPO(
            InContextActorCriticPolicy,
            env,
            n_steps=64,
            batch_size=32,
            seed=0,
            policy_kwargs={"optimizer_kwargs": options},
        )
        return model, model.learn(64, callback=InContextCallback())  # one update: later rollouts amplify rounding

    fused, _ = trained()
    slow, _ = trained(fused=False)
    assert fused.policy.optimizer.param_groups[0]["fused"] and not slow.policy.optimizer.param_groups[0]["fused"]
    start = PPO(InContextActorCriticPolicy, fused.env, n_steps=64, seed=0).policy.state_dict()
    for name, parameter in fused.policy.named_parameters():
        assert (parameter - start[name]).abs().max() > 1e-4  # it did learn
        torch.testing.assert_close(parameter, slow.policy.get_parameter(name), rtol=0, atol=1e-6)
    # What was saved without it goes on without it.
    slow.save(tmp_path / "slow")
    assert not PPO.load(tmp_path / "slow", fused.env).policy.optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("asked", [{"foreach": True}, {"capturable": True}, {"fused": None}])
def test_an_optimizer_that_was_asked_for_stays(asked):
    env = RollingContext(gym.make("Pendulum-v1"), length=256)
    model = PPO(InContextActorCriticPolicy, env, n_steps=64, policy_kwargs={"optimizer_kwargs": asked})
    assert not model.policy.optimizer.defaults["fused"]
    assert model.policy.optimizer.defaults.items() >= asked.items()
    model = A2C(InContextActorCriticPolicy, env)  # RMSprop knows no fused steps
    assert "fused" not in model.policy.optimizer.defaults


class Odd(BaseFeaturesExtractor):
    """One parameter beside the networks', of a kind that torch's fused step takes wrongly or not at all."""

    def __init__(self, space, parameter):
        super().__init__(space, int(np.prod(space.shape)))
        self.odd = torch.nn.Parameter(parameter.clone(memory_format=torch.preserve_format))

    def forward(self, observations):
        weights = torch.linspace(-1, 1, self.odd.numel()).view(self.odd.shape)
        return observations + (self.odd.real * weights).sum()


@pytest.mark.parametrize(
    "parameter", [torch.zeros(2, 3).T, torch.zeros(3, dtype=torch.complex64)], ids=["transposed", "complex"]
)
def test_parameters_that_a_fused_step_takes_wrongly_are_stepped_one_by_one(parameter):
    def trained(**optimizer):
        env = RollingContext(gym.make("Pendulum-v1"), length=256)
        options = {"features_extractor_class": Odd, "features_extractor_kwargs": {"parameter": parameter}, **optimizer}
        torch.manual_seed(0)
        model = PPO(InContextActorCriticPolicy, env, n_steps=64, seed=0, policy_kwargs=options)
        model.learn(64, callback=InContextCallback())
        return model.policy.optimizer.defaults["fused"], model.policy.features_extractor.odd.detach()

    fused, moved = trained()
    assert not fused and moved.is_contiguous() == parameter.is_contiguous() and moved.real.abs().max() > 1e-4
    torch.testing.assert_close(moved, trained(optimizer_kwargs={"fused": False, "eps": 1e-5})[1], rtol=0, atol=1e-6)


def test_values_learn_the_return():
    # A reward of 1 for ever, cut every 5 steps and bootstrapped there: the value is 1 / (1 - gamma) everywhere.
    model = make_model(DummyVecEnv([steps_env()]), gamma=0.9).learn(64, callback=InContextCallback())
    states = np.array([[t, 5.0, 0.0] for t in range(5)])
    np.testing.assert_allclose(values(model, states), 10.0, rtol=1e-6)
    # The same rewards up to a terminal state: what is left of the episode.
    model = make_model(
        DummyVecEnv([steps_env(how="terminated")]), gamma=0.9, critic={"offset": "removed", "ridge": 1e-8}
    )
    model.learn(160, callback=InContextCallback())
    episode = 20.0  # one that the context holds
    left = [sum(0.9**k for k in range(5 - t)) for t in range(5)]
    np.testing.assert_allclose(values(model, np.array([[t, episode, 0.0] for t in range(5)])), left, rtol=0.05)


class Task(Steps):
    """obs = [step, 0, one-hot of the tag]."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observation(self):
        return np.array([self.t, 0.0, *np.eye(2)[int(self.tag)]], np.float32)


def task_env(**options):
    return lambda: RollingContext(Task(**options), length=64)


def test_terminal_values_come_from_the_finished_episode_of_the_right_environment():
    def terminal_values(*environments):
        model = make_model(DummyVecEnv(list(environments)), critic={"n_tasks": 2, "offset": "removed"})
        recorded = {0: [], 1: []}
        predict = model.policy.predict_values

        def recording(obs):
            out = predict(obs)
            if len(obs) == 1 and float(obs[0, 0]) in (
                3.0,
                4.0,
            ):  # a last observation, of one environment, after its reset
                recorded[int(obs[0, 3])].append(float(out))
            return out

        model.policy.predict_values = recording
        model.learn(96 * len(environments), callback=InContextCallback())
        return recorded

    first = task_env(length=3, tag=0, reward=1.0, growth=0.1)
    second = task_env(length=4, tag=1, reward=10.0, growth=0.1)
    together = terminal_values(first, second)
    assert len(together[0]) == 96 // 3 and len(together[1]) == 96 // 4
    np.testing.assert_allclose(together[0], terminal_values(first)[0][: 96 // 3], rtol=1e-5)
    np.testing.assert_allclose(together[1], terminal_values(second)[1][: 96 // 4], rtol=1e-5)
    assert together[1][-1] == pytest.approx(10 * together[0][-1], rel=0.15)


@pytest.mark.parametrize("norm_obs, norm_reward", [(True, True), (False, True), (True, False)])
def test_queries_and_context_are_measured_alike_under_vec_normalize(norm_obs, norm_reward):
    class Drift(Steps):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

        def observation(self):
            return np.array([1000.0 + self.t + 20 * self.episode, 0.001 * self.t])

    env = DummyVecEnv([lambda: RollingContext(Drift(length=20, reward=500.0), length=64)])
    env = VecNormalize(env, norm_obs=norm_obs, norm_reward=norm_reward, gamma=0.9)
    model = make_model(env, n_steps=50, batch_size=50, critic={"standardize": False, "offset": "removed"})
    at_the_call = []
    evaluate = model.policy.critic.evaluate

    def recording(context):
        at_the_call.append((context, model._last_obs.copy()))
        return evaluate(context)

    model.policy.critic.evaluate = recording
    model.learn(200, callback=InContextCallback())
    context, query = at_the_call[-1]
    newest = len(context) - 1
    if not bool(context.truncated[newest]):
        np.testing.assert_array_equal(
            context.next_states[newest].numpy().astype(np.float32), query[0].astype(np.float32)
        )
    chained = ~context.truncated[:-1]
    torch.testing.assert_close(context.next_states[:-1][chained], context.states[1:][chained])
    scale = 500.0 / np.sqrt(env.ret_rms.var + env.epsilon) if norm_reward else 500.0
    assert float(context.rewards.max()) == pytest.approx(scale, rel=0.2)
    assert float(np.mean(values(model, query))) == pytest.approx(10 * float(context.rewards[-1]), rel=0.2)


@pytest.mark.parametrize("vec_env_cls", [DummyVecEnv, SubprocVecEnv])
@pytest.mark.parametrize("n_envs", [1, 3, 16])
def test_any_number_of_environments(vec_env_cls, n_envs):
    if vec_env_cls is SubprocVecEnv and n_envs > 3:
        pytest.skip("sixteen processes add nothing over three but time")
    env = vec_env_cls([steps_env(tag=i) for i in range(n_envs)])
    try:
        model = make_model(env).learn(2 * 16 * n_envs, callback=InContextCallback())
        assert int(model.policy.critic.context.n_transitions.sum()) == 16 * n_envs
    finally:
        env.close()


def test_subprocesses_change_nothing():
    results = []
    for cls in (DummyVecEnv, SubprocVecEnv):
        env = cls([steps_env(tag=i) for i in range(2)])
        model = make_model(env).learn(96, callback=InContextCallback())
        results.append(torch.cat([p.detach().flatten() for p in model.policy.parameters()]))
        env.close()
    torch.testing.assert_close(results[0], results[1])


def test_save_and_load_bring_the_critic_back_with_its_context(tmp_path):
    model = make_model(
        DummyVecEnv([steps_env(tag=i, growth=0.5) for i in range(4)]), critic={"kernel": RBFKernel("median")}
    )
    model.learn(192, callback=InContextCallback())
    states = np.random.default_rng(0).normal(size=(7, 3))
    model.save(tmp_path / "model")
    loaded = PPO.load(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(values(loaded, states), values(model, states))
    assert np.ptp(values(model, states)) > 0
    assert loaded.predict(np.zeros(3))[0].shape == (1,)
    # ... and learns on, with another number of environments.
    loaded = PPO.load(tmp_path / "model", env=DummyVecEnv([steps_env()]), device="cpu")
    loaded.learn(32, callback=InContextCallback())
    model.policy.save(tmp_path / "policy")
    policy = InContextActorCriticPolicy.load(tmp_path / "policy", device="cpu")
    torch.testing.assert_close(
        policy.predict_values(torch.as_tensor(states)), model.policy.predict_values(torch.as_tensor(states))
    )


def test_a_deep_copy_of_the_critic_is_independent():
    critic = make_model(DummyVecEnv([steps_env(growth=0.5)])).learn(48, callback=InContextCallback()).policy.critic
    clone, states = copy.deepcopy(critic), torch.randn(5, 3)
    before = clone(states)
    critic.condition(Context.empty(3))
    torch.testing.assert_close(clone(states), before)
    assert (critic(states) == 0).all() and before.std() > 0


def test_after_set_env_no_context_of_the_old_environment_is_left():
    model = make_model(DummyVecEnv([steps_env(reward=100.0)])).learn(64, callback=InContextCallback())
    model.set_env(DummyVecEnv([steps_env(tag=5, reward=1.0)]))
    seen, forward = [], model.policy.forward

    def recording(obs, *args, **kwargs):
        out = forward(obs, *args, **kwargs)
        seen.append(out[1].clone())
        return out

    model.policy.forward = recording
    model.learn(32, callback=InContextCallback())
    assert (seen[0] == 0).all()  # as with a fresh context
    assert float(model.policy.critic.context.rewards.max()) == 1.0


def test_learn_twice_goes_on_with_the_context():
    model = make_model(DummyVecEnv([steps_env()]))
    model.learn(32, callback=InContextCallback())
    model.learn(16, callback=InContextCallback(), reset_num_timesteps=False)
    assert model.num_timesteps == 48
    assert int(model.policy.critic.context.n_transitions.sum()) == 32


SPACES = [
    gym.spaces.Discrete(5),
    gym.spaces.MultiDiscrete([2, 3]),
    gym.spaces.MultiBinary(4),
    gym.spaces.Box(-1, 1, (2, 3), np.float64),
    gym.spaces.Box(0, 255, (4,), np.uint8),
    gym.spaces.Dict(b=gym.spaces.Discrete(3), a=gym.spaces.Box(-1, 1, (2,)), c=gym.spaces.MultiBinary(2)),
]


@pytest.mark.parametrize("space", SPACES, ids=lambda s: type(s).__name__ + str(s.shape or ""))
def test_any_observation_space_that_flattens(space):
    # The callback itself compares what the wrapper flattened with what the policy flattened.
    env = make_vec_env(lambda: RollingContext(Space(space), length=64), n_envs=2, seed=0)
    model = make_model(env).learn(96, callback=InContextCallback())
    assert model.policy.critic.n_features == gym.spaces.flatdim(space)
    assert float(model.policy.critic.coefficients.abs().max()) > 0


def test_dict_observations_under_vec_normalize():
    env = make_vec_env(lambda: RollingContext(Space(SPACES[-1]), length=64), n_envs=2, seed=0)
    make_model(VecNormalize(env, norm_obs_keys=["a"], gamma=0.9)).learn(96, callback=InContextCallback())


def test_the_actor_may_have_features_of_its_own():
    class Doubled(torch.nn.Module):
        def __init__(self, observation_space, features_dim=8):
            super().__init__()
            self.features_dim = features_dim
            self.net = torch.nn.Linear(3, 8)

        def forward(self, observations):
            return self.net(observations)

    env = DummyVecEnv([steps_env()])
    model = PPO(
        InContextActorCriticPolicy, env, n_steps=16, batch_size=8, seed=0, device="cpu",
        policy_kwargs={"features_extractor_class": Doubled, "net_arch": [16]},
    )  # fmt: skip
    weight = model.policy.pi_features_extractor.net.weight.detach().clone()
    model.learn(48, callback=InContextCallback())
    assert not torch.equal(weight, model.policy.pi_features_extractor.net.weight)


def test_a_task_uses_its_own_context_only():
    critic = {"n_tasks": 2, "offset": "removed"}
    for normalize in (False, True):
        vec = DummyVecEnv([task_env(tag=0, reward=1.0), task_env(tag=1, reward=-3.0)])
        vec = VecNormalize(vec, norm_reward=False) if normalize else vec
        model = make_model(vec, critic=critic).learn(96, callback=InContextCallback())
        both = model._last_obs
        np.testing.assert_allclose(values(model, both), [10.0, -30.0], rtol=0.05)
        # In one call or one by one, whatever the order.
        np.testing.assert_allclose(values(model, both[::-1]), values(model, both)[::-1])
        np.testing.assert_allclose([values(model, both[i]) for i in range(2)], values(model, both)[:, None])


# At the door


def test_a_policy_without_its_callback_says_so():
    model = make_model(DummyVecEnv([steps_env()]))
    with pytest.raises(RuntimeError, match=r"callback=InContextCallback\(\)"):
        model.learn(16)
    model.learn(32, callback=InContextCallback())
    with pytest.raises(RuntimeError, match="trained without its callback"):
        model.learn(16)  # conditioned once, but stale
    assert np.isfinite(values(model, np.zeros((1, 3)))).all()  # asking for values stays possible


def test_trpo_updates_its_actor_and_leaves_the_critic_alone():
    from sb3_contrib import TRPO

    env = DummyVecEnv([steps_env(growth=0.5)])
    model = TRPO(InContextActorCriticPolicy, env, n_steps=16, batch_size=8, gamma=0.9, seed=0, device="cpu")
    before = {name: value.clone() for name, value in model.policy.named_parameters()}
    model.learn(64, callback=InContextCallback())
    assert any(not torch.equal(value, before[name]) for name, value in model.policy.named_parameters())
    assert model.policy.critic.context is not None and int(model.policy.critic.context.mask.sum()) == 48


def test_an_environment_without_rolling_context_says_so():
    model = make_model(DummyVecEnv([lambda: Monitor(Steps())]))
    with pytest.raises(ValueError, match="reads its transitions from a RollingContext"):
        model.learn(16, callback=InContextCallback())
    assert model.num_timesteps == 0


def test_the_callback_with_another_policy_says_so():
    model = PPO("MlpPolicy", DummyVecEnv([steps_env()]), n_steps=16, batch_size=8, device="cpu")
    with pytest.raises(TypeError, match="Build the algorithm with InContextActorCriticPolicy"):
        model.learn(16, callback=InContextCallback())


def test_another_gamma_says_so():
    model = make_model(DummyVecEnv([steps_env()]), gamma=0.9, critic={"gamma": 0.99})
    with pytest.raises(ValueError, match=r"critic's gamma is 0.99 and the algorithm's is 0.9"):
        model.learn(16, callback=InContextCallback())
    make_model(DummyVecEnv([steps_env()]), gamma=0.9, critic={"gamma": 0.9}).learn(16, callback=InContextCallback())


def test_a_wrapper_that_changes_observations_outside_says_so():
    class Shifted(gym.ObservationWrapper):
        def observation(self, observation):
            return observation + 1.0

    model = make_model(DummyVecEnv([lambda: Shifted(steps_env()())]))
    with pytest.raises(ValueError, match="Something outside RollingContext changes observations"):
        model.learn(16, callback=InContextCallback())
    model = make_model(VecFrameStack(DummyVecEnv([steps_env()]), 2))
    with pytest.raises(ValueError, match=r"VecFrameStack of DummyVecEnv"):
        model.learn(16, callback=InContextCallback())


def test_images_are_refused():
    space = gym.spaces.Box(0, 255, (3, 36, 36), np.uint8)
    with pytest.raises(ValueError, match="is an image"):
        InContextActorCriticPolicy(space, Steps.action_space, lambda _: 1e-3)
    with pytest.raises(ValueError, match="'camera' of the observation space is an image"):
        InContextActorCriticPolicy(gym.spaces.Dict(camera=space), Steps.action_space, lambda _: 1e-3)


@pytest.mark.parametrize(
    "critic, message",
    [
        ({"kernel": "rfb"}, "unknown kernel 'rfb'"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"gamma": 1.5}, r"gamma must lie in \[0, 1\]"),
        ({"kernel": "relu"}, "n_landmarks=None"),
        ({"n_tasks": 3}, "n_tasks must be at least 1"),
        ({"n_layers": 2.5}, "n_layers must be a whole number"),
        ({"kernel": LinearKernel(), "temperature": 1.0}, "temperature belongs to a kernel given by name"),
    ],
)
def test_arguments_of_the_critic_out_of_range(critic, message):
    with pytest.raises(ValueError, match=message):
        InContextCritic(3, **critic)


def test_layers_that_diverge_say_which_and_what_to_do():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(65, 3, generator=generator, dtype=torch.float64)
    context = Context(states[:-1], torch.ones(64), states[1:], torch.zeros(64, dtype=torch.bool))
    critic = InContextCritic(
        3, kernel="rbf", n_layers=30, step_sizes=1.0, step_normalization="none", n_landmarks=None, value_shift=False
    )
    with pytest.raises(FloatingPointError, match='step_normalization="row_sum"'):
        critic.condition(context)
    assert math.isinf(InContextCritic(3).transformer.n_layers)


@pytest.mark.parametrize(
    "critic",
    [
        {"algorithm": "residual_gradient", "kernel": "rbf", "ridge": 1e-2, "n_landmarks": 32},
        {
            "algorithm": "residual_gradient",
            "kernel": "rbf",
            "n_layers": 5,
            "acceleration": "conjugate",
            "n_landmarks": 32,
        },
        {"algorithm": "td_lambda", "trace_decay": 0.8, "n_landmarks": 32},
        {"algorithm": "monte_carlo", "n_landmarks": 32},
        {"algorithm": "average_reward", "n_landmarks": 32},
        {"transformer": AdaptiveTransformer([1.0, 3.0], [1e-2], n_layers=5, gamma=0.9), "standardize": False},
    ],
    ids=lambda c: c.get("algorithm", "adaptive") + c.get("acceleration", ""),
)
def test_every_algorithm_trains_ppo_and_comes_back_from_a_file(critic, tmp_path):
    env = RollingContext(gym.make("Pendulum-v1"), length=64)
    model = PPO(InContextActorCriticPolicy, env, n_steps=64, batch_size=32, n_epochs=1, gamma=0.9, seed=0,
                policy_kwargs={"critic_kwargs": critic})  # fmt: skip
    model.learn(192, callback=[InContextCallback(), TDErrorCallback()])
    before = model.policy.critic
    asked = torch.randn(7, 3)
    values = before(asked)
    assert torch.isfinite(values).all() and float(values.std()) > 0
    curve = before.td_error_by_depth()
    assert curve and all(math.isfinite(error) for error in curve.values())
    model.save(tmp_path / "model")
    loaded = PPO.load(tmp_path / "model")
    torch.testing.assert_close(loaded.policy.critic(asked), values)

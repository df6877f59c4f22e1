"""Rows about peers: the same regression by other libraries where they are installed, and SB3's own value network."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor

from icrl_gym.context import Context
from icrl_gym.critic import InContextCritic
from icrl_gym.kernels import RBFKernel
from icrl_gym.speed_benchmark.measured import Measured, Settings, missing
from icrl_gym.speed_benchmark.problems import random_context, random_states
from icrl_gym.speed_benchmark.timing import ratio_of, side_by_side, spread
from icrl_gym.transformer import InContextTransformer

__all__ = ["peers", "value_network"]


def peers(settings: Settings) -> list[Measured]:
    """Kernel ridge regression on returns (the fixed point of Monte Carlo layers), fitted and asked for values.

    All of them solve (K + rho n I) c = y with the RBF kernel, in float64, and give k(s, S) c.
    """
    n, m, d = settings.size(2048, 128), settings.size(2048, 128), settings.n_features
    context, queries = random_context(n, d), random_states(m, d)
    ridge, temperature = 1e-3, float(d)
    transformer = InContextTransformer(
        RBFKernel(temperature), n_layers=math.inf, algorithm="monte_carlo", ridge=ridge, gamma=0.9
    )
    targets = transformer.algorithm.targets(context, context.rewards, transformer.gamma)

    def ours() -> Tensor:
        return transformer.condition(context)(queries)

    makers: dict[str, Callable[..., Callable[[], Tensor]]] = {
        "scikit-learn KernelRidge": _scikit_learn,
        "GPyTorch exact GP mean": _gpytorch,
        "PyKeOps conjugate gradients": _keops,
    }
    rows = []
    what = f"kernel ridge, {n} transitions, {m} values"
    for name, make in makers.items():
        try:
            theirs = make(context.states, targets, queries, ridge * n, temperature)
        except ImportError as error:
            rows.append(missing("peers", what, name, f"not installed ({error.name or error})"))
            continue
        taken = side_by_side({"ours": ours, "theirs": theirs}, min(settings.rounds, 5))
        rows.append(
            Measured(
                "peers", what, name, ratio_of(taken["theirs"], taken["ours"]), "x faster", None,
                {key: spread(values).median for key, values in taken.items()},
                {"float64": float((ours() - theirs()).abs().max())},
            )
        )  # fmt: skip
    return rows


def _scikit_learn(
    states: Tensor, targets: Tensor, queries: Tensor, alpha: float, temperature: float
) -> Callable[[], Tensor]:
    from sklearn.kernel_ridge import KernelRidge

    x, y, asked = states.numpy(), targets.numpy(), queries.numpy()

    def values() -> Tensor:
        return torch.as_tensor(KernelRidge(alpha=alpha, kernel="rbf", gamma=0.5 / temperature).fit(x, y).predict(asked))

    return values


def _gpytorch(
    states: Tensor, targets: Tensor, queries: Tensor, alpha: float, temperature: float
) -> Callable[[], Tensor]:
    import gpytorch

    class ExactGP(gpytorch.models.ExactGP):
        def __init__(self, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
            super().__init__(states, targets, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.RBFKernel()

        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def values() -> Tensor:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        model = ExactGP(likelihood).double()
        likelihood.noise, model.covar_module.lengthscale = alpha, temperature**0.5
        model.eval(), likelihood.eval()
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # By Cholesky at every size: its default conjugate gradients stop at 1%.
            with gpytorch.settings.fast_computations(covar_root_decomposition=False, log_prob=False, solves=False):
                return model(queries).mean

    return values


def _keops(states: Tensor, targets: Tensor, queries: Tensor, alpha: float, temperature: float) -> Callable[[], Tensor]:
    from pykeops.torch import Vi, Vj

    def kernel(x: Tensor, y: Tensor) -> Any:
        return (-Vi(x).sqdist(Vj(y)) / (2 * temperature)).exp()

    def values() -> Tensor:
        weights = kernel(states, states).solve(targets.unsqueeze(-1), alpha=alpha, eps=1e-8)
        return (kernel(queries, states) @ weights).squeeze(-1)

    return values


def value_network(settings: Settings) -> list[Measured]:
    """What a rollout costs a critic: conditioning and values, against training SB3's value network on it and its values.

    The learned one has SB3's two layers of 64 units, ten epochs, minibatches of 64 and Adam; the in-context one its defaults, two
    rollouts of context, conditioned once.
    """
    steps, d = settings.size(2048, 128), settings.n_features
    context = random_context(2 * steps, d)
    observations = context.states[-steps:].float()
    returns = torch.randn(steps, generator=torch.Generator().manual_seed(0))
    critic = InContextCritic(d)
    space = gym.spaces.Box(-np.inf, np.inf, (d,), np.float32)
    policy = ActorCriticPolicy(space, gym.spaces.Box(-1, 1, (4,), np.float32), lambda _: 3e-4)
    networks = [policy.mlp_extractor.value_net, policy.value_net]
    optimizer = torch.optim.Adam([p for network in networks for p in network.parameters()], lr=3e-4)

    def learned(epochs: int = 10) -> Tensor:
        for _ in range(epochs):
            for rows in torch.randperm(steps).split(64):
                latent = policy.mlp_extractor.forward_critic(observations[rows])
                loss = (policy.value_net(latent).squeeze(-1) - returns[rows]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            return policy.value_net(policy.mlp_extractor.forward_critic(observations))

    def in_context(data: Context = context) -> Tensor:
        critic.condition(data)
        return critic(observations)

    taken = side_by_side({"in-context": in_context, "learned": functools.partial(learned, 10)}, min(settings.rounds, 5))
    return [
        Measured(
            "value-network", f"the critic's share of a rollout of {steps}: conditioned on {2 * steps}, {steps} values",
            "SB3's value network: ten epochs, values", ratio_of(taken["learned"], taken["in-context"]), "x faster", None,
            {key: spread(values).median for key, values in taken.items()},
            note="the policy's own network is trained in both cases and not counted",
        )
    ]  # fmt: skip

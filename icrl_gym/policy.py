"""InContextActorCriticPolicy: Stable-Baselines3's actor-critic policy with an in-context critic for a value network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    MlpExtractor,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from icrl_gym.critic import InContextCritic

__all__ = ["InContextActorCriticPolicy"]


class InContextActorCriticPolicy(ActorCriticPolicy):
    """An actor that learns beside a critic that does not: for stock PPO, A2C and sb3-contrib's TRPO.

    The actor is SB3's own. Values come from an :class:`~icrl_gym.critic.InContextCritic`, which
    :class:`~icrl_gym.callbacks.InContextCallback` conditions at the start of every rollout. No parameter of the critic
    exists, so none is in the optimizer; what its context gave it is in the ``state_dict`` and so in ``PPO.save``.

    The policy reads an entry of an observation that is not finite as zero, so that one bad observation cannot make its
    parameters NaN.

    Args:
        observation_space: Anything that is not an image: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of them.
        action_space: As for SB3.
        lr_schedule: As for SB3.
        critic_kwargs: Arguments of :class:`~icrl_gym.critic.InContextCritic`.
        **kwargs: Arguments of SB3's ``ActorCriticPolicy``. ``net_arch`` describes the actor; its ``vf`` part is not used. Adam
            is fused unless ``optimizer_kwargs`` say otherwise, ``dict(fused=False, eps=1e-5)`` for example: SB3's eps of 1e-5
            holds where they are not given at all, Adam's own of 1e-8 where they are.

    Raises:
        ValueError: An observation space of images, or an argument of the critic out of its range.

    Source: He et al. 2026, section 3; the use in PPO is this package's own.

    Example:
        >>> import gymnasium as gym
        >>> from stable_baselines3 import PPO
        >>> from icrl_gym.callbacks import InContextCallback
        >>> from icrl_gym.wrappers import RollingContext
        >>> env = RollingContext(gym.make("Pendulum-v1"), length=1024)
        >>> model = PPO(InContextActorCriticPolicy, env, n_steps=64, gamma=0.9)
        >>> model = model.learn(128, callback=InContextCallback())
    """

    value_net: InContextCritic  # type: ignore[assignment]

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *args: Any,
        critic_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_images(observation_space)
        # (n_envs,): the cross-fitted values of what follows the rollout, while the rollout buffer holds such values (without
        # the offset); None: it holds the critic's own. A matter of one rollout, never saved.
        self.cross_fitted: np.ndarray | None = None
        self.critic_kwargs = dict(critic_kwargs or {})
        if isinstance(observation_space, spaces.Dict):
            kwargs.setdefault("features_extractor_class", CombinedExtractor)
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)

    @property
    def critic(self) -> InContextCritic:
        """The critic; SB3's name for the same module is ``value_net``."""
        return self.value_net

    def _build_mlp_extractor(self) -> None:
        actor = self.net_arch.get("pi", []) if isinstance(self.net_arch, dict) else self.net_arch
        self.mlp_extractor = MlpExtractor(
            self.features_dim, net_arch={"pi": actor, "vf": []}, activation_fn=self.activation_fn, device=self.device
        )

    def _build(self, lr_schedule: Schedule) -> None:
        # The critic reads the flattened observation, whatever features the actor learns: they would move under the context.
        self.share_features_extractor = False
        space = self.observation_space
        flat = CombinedExtractor(space) if isinstance(space, spaces.Dict) else FlattenExtractor(space)
        if type(self.pi_features_extractor) is type(flat):
            self.vf_features_extractor = self.pi_features_extractor
        else:
            self.vf_features_extractor = flat
            self.vf_features_extractor.register_forward_pre_hook(_finite_input)
        self.pi_features_extractor.register_forward_pre_hook(_finite_input)
        super()._build(lr_schedule)
        self.value_net = InContextCritic(int(self.vf_features_extractor.features_dim), **self.critic_kwargs)
        # Again, now without the parameters of the value network that SB3 has built in the meantime.
        options = {**_fused(self.optimizer_class, self.parameters(), self.optimizer_kwargs), **self.optimizer_kwargs}
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **options)  # type: ignore[call-arg]

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor | None = None) -> Any:
        """SB3's, once for both networks where the actor too reads the flattened observation."""
        if features_extractor is None and self.pi_features_extractor is self.vf_features_extractor:
            states = self.critic_states(obs)
            return states, states
        return super().extract_features(obs, features_extractor)

    def critic_states(self, obs: PyTorchObs) -> Tensor:
        """What the critic sees of observations: (m, d), flattened."""
        # BasePolicy's method: ActorCriticPolicy's own returns the features of both networks.
        return super(ActorCriticPolicy, self).extract_features(obs, self.vf_features_extractor)

    def evaluate_actions(self, obs: PyTorchObs, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """SB3's, once more of the frozen values of the rollout.

        Raises:
            RuntimeError: An update whose rollout no callback prepared: its values would be of an old context.
        """
        if self.training and torch.is_grad_enabled() and not self.critic.is_synced:
            raise RuntimeError(
                "this policy is being trained without its callback, so the critic's context is not kept up to date. "
                "Pass `callback=InContextCallback()` to `learn`."
            )
        return super().evaluate_actions(obs, actions)

    def predict_values(self, obs: PyTorchObs) -> Tensor:
        """SB3's; the gradient that TRPO takes of these values, for a network that it means to train, ends here."""
        values = super().predict_values(obs)
        return values.requires_grad_() if torch.is_grad_enabled() else values

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "critic_kwargs": self.critic_kwargs}


def _fused(
    optimizer_class: type[torch.optim.Optimizer], parameters: Iterable[Tensor], options: dict[str, Any]
) -> dict[str, Any]:
    """Adam steps in one call instead of a dozen operations a parameter, where nothing else was asked for.

    The same mathematics. Networks of PPO's size spend more on starting operations than on the operations.
    """
    asked = {"fused", "foreach", "capturable", "differentiable"} & options.keys()
    # Torch's fused step refuses complex parameters, and reads strided ones (a transposed weight) in the wrong order.
    fit = all(p.is_floating_point() and p.is_contiguous() for p in parameters)
    return {"fused": True} if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and fit and not asked else {}


def _finite_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward hook: entries of an observation that are not finite become zero."""
    (observations,) = args
    if isinstance(observations, dict):
        return ({key: torch.nan_to_num(value, 0.0, 0.0, 0.0) for key, value in observations.items()},)
    return (torch.nan_to_num(observations, 0.0, 0.0, 0.0),)


def _refuse_images(space: spaces.Space) -> None:
    parts = space.spaces.items() if isinstance(space, spaces.Dict) else [("", space)]
    for name, part in parts:
        if is_image_space(part):
            of = f"{name!r} of the observation space" if name else "the observation space"
            raise ValueError(
                f"{of} is an image, {part}: distances between raw pixels say little about values. "
                f"Encode images to a vector in a wrapper first (and wrap that in RollingContext)."
            )

"""Put the in-context critic into your own PPO script: five lines of it are about the critic.

Run it:  python examples/plug_into_ppo.py            (Pendulum-v1, one to two minutes)
         python examples/plug_into_ppo.py --quick    (a few seconds)
"""

import argparse

import torch
from icrl_gym.callbacks import InContextCallback
from icrl_gym.wrappers import RollingContext
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from icrl_gym import InContextActorCriticPolicy


def main() -> None:
    """Train, evaluate, print the mean return."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few hundred steps, to see that it runs")
    quick = parser.parse_args().quick

    torch.set_num_threads(1)  # networks this small are slowed down by more
    n_steps = 64 if quick else 512
    window = {"length": 8 * n_steps}  # eight rollouts
    env = make_vec_env("Pendulum-v1", n_envs=4, seed=0, wrapper_class=RollingContext, wrapper_kwargs=window)
    env = VecNormalize(env, gamma=0.9)
    model = PPO(InContextActorCriticPolicy, env, gamma=0.9, n_steps=n_steps, learning_rate=1e-3, seed=0, device="cpu")
    model.learn(512 if quick else 100_000, callback=InContextCallback())

    env.training = env.norm_reward = False
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=2 if quick else 20)
    print(f"mean return {mean:.0f} +- {deviation:.0f} over evaluation episodes")


if __name__ == "__main__":
    main()

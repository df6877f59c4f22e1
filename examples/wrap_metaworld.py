"""Wrap a Meta-World environment, fill its context with a few episodes, and evaluate the policy that made them.

Run it:  python examples/wrap_metaworld.py [--task reach-v3] [--quick]
"""

import argparse
import math

import numpy as np
import torch

from icrl_gym import InContextTransformer
from icrl_gym.kernels import LaplacianKernel
from icrl_gym.metaworld import ScriptedExpert, make_env


def main() -> None:
    """Collect with a noisy expert, condition on it, compare values with the returns of new episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="reach-v3", help="any of Meta-World's fifty v3 tasks")
    parser.add_argument("--quick", action="store_true", help="two short episodes, to see that it runs")
    arguments = parser.parse_args()
    episodes, steps = (2, 100) if arguments.quick else (20, 500)
    gamma = 0.9

    env = make_env(arguments.task, seed=0, max_episode_steps=steps, context_length=episodes * steps)
    expert = ScriptedExpert(arguments.task, noise=0.5, seed=0)

    def run_episode() -> tuple[np.ndarray, np.ndarray]:
        observation, _ = env.reset()
        states, rewards, done = [], [], False
        while not done:
            states.append(observation)
            observation, reward, terminated, truncated, _ = env.step(expert(observation))
            rewards.append(float(reward))
            done = terminated or truncated
        return np.array(states), np.array(rewards)

    for _ in range(episodes):
        run_episode()
    context = env.get_wrapper_attr("context")
    print(f"the wrapper recorded {context}")

    transformer = InContextTransformer(
        LaplacianKernel("median"), n_layers=math.inf, gamma=gamma, value_shift=True, n_landmarks=256
    )
    value = transformer.condition(context)

    states, rewards = run_episode()
    # Returns of the new episode; the last steps are left out because their future was cut off.
    returns = np.zeros(len(rewards))
    future = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        future = rewards[t] + gamma * future
        returns[t] = future
    kept = slice(0, len(rewards) - 40)
    predicted = value(torch.as_tensor(states[kept])).numpy()
    print(
        f"correlation of the value with the returns of a new episode: {np.corrcoef(predicted, returns[kept])[0, 1]:.2f}"
    )


if __name__ == "__main__":
    main()

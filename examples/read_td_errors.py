"""Read the TD errors that a run wrote to TensorBoard, without TensorBoard: as numbers.

Run it:  python examples/read_td_errors.py [--quick]
To look at the same run in the browser:  tensorboard --logdir LOGDIR  (the folder that it prints)
"""

import argparse
import tempfile

from icrl_gym.callbacks import InContextCallback
from icrl_gym.wrappers import RollingContext
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from icrl_gym import InContextActorCriticPolicy


def main() -> None:
    """Train on CartPole with a TensorBoard log, then print its TD errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few hundred steps, to see that it runs")
    quick = parser.parse_args().quick

    logdir = tempfile.mkdtemp(prefix="icrl_gym_")
    env = make_vec_env("CartPole-v1", n_envs=4, wrapper_class=RollingContext, wrapper_kwargs={"length": 1024})
    n_steps = 64 if quick else 128
    model = PPO(InContextActorCriticPolicy, env, n_steps=n_steps, device="cpu", tensorboard_log=logdir)
    model.learn(1024 if quick else 20_480, callback=InContextCallback(), tb_log_name="cartpole")

    events = EventAccumulator(f"{logdir}/cartpole_1").Reload()
    print(f"{logdir}\n   steps   out-of-sample rms   in-context rms")
    in_context = {event.step: event.value for event in events.Scalars("td_error/context_rms")}
    for event in events.Scalars("td_error/rollout_rms"):
        print(f"{event.step:8d}   {event.value:17.3f}   {in_context.get(event.step, float('nan')):14.3f}")


if __name__ == "__main__":
    main()

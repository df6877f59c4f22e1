"""`icrl-gym` as a user runs it: folders, resuming, comparing, and one line for what is wrong."""

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from icrl_gym.cli import main
from icrl_gym.critic import InContextCritic
from icrl_gym.plots import binned
from icrl_gym.runs import Episode, FolderInUseError, RunFolder, load_contexts
from icrl_gym.statistics import bootstrap_interval
from icrl_gym.train import CriticConfig, TrainConfig, TrainingRun, train
from icrl_gym.train_callbacks import RunCallback

SMALL = {"n_envs": 2, "n_steps": 128, "batch_size": 64, "n_epochs": 1, "gamma": 0.9, "checkpoint_freq": 256}


def small(path, **options):
    return TrainConfig(**{**SMALL, "env": ("Pendulum-v1",), "total_timesteps": 1024, "run_dir": str(path), **options})


@pytest.mark.parametrize("critic", ["in-context", "mlp"])
def test_a_run_s_folder_answers_what_it_was(tmp_path, critic):
    folder = RunFolder(train(small(tmp_path / "run", critic=critic, seed=3)))
    assert folder.finished
    assert folder.config["critic"] == critic and folder.config["gamma"] == 0.9 and folder.config["seed"] == 3
    status = folder.status
    assert status["timesteps"] == 1024 and status["seed"] == 3 and status["steps_per_second"] > 0
    assert {"python", "torch", "stable-baselines3", "gymnasium", "metaworld"} <= set(status["versions"])
    assert status["command"].startswith("icrl-gym")
    for name in ("model.zip", "vecnormalize.pkl", "learning_curve.png", "progress_0.csv"):
        assert (folder.path / name).stat().st_size > 100, name
    assert not list(folder.path.rglob(".partial*"))
    episodes = folder.read_episodes()
    assert len(episodes) == 4 and {e.length for e in episodes} == {200}
    model = PPO.load(folder.path / "model.zip", device="cpu")
    assert model.num_timesteps == 1024
    events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    tag = "td_error/rollout_rms" if critic == "in-context" else "train/value_loss"
    assert tag in events.Tags()["scalars"]
    contexts = folder.checkpoints[-1] / "contexts.npz"
    assert contexts.exists() == (critic == "in-context")
    if contexts.exists():
        assert [len(c) for c in load_contexts(contexts)] == [512, 512]


def test_a_run_goes_on_with_the_defaults_that_it_began_with(tmp_path, monkeypatch):
    path = train(small(tmp_path / "run"))
    began = PPO.load(path / "model.zip", device="cpu").policy.critic
    assert began.settings["oldest_weight"] == 0.1 and began.settings["trace_decay"] == 0.8

    def later_version(n_features, **given):
        return InContextCritic(
            n_features, **{"kernel": "rbf", "n_landmarks": 8, "standardize": False, "ridge": 0.5, **given}
        )

    monkeypatch.setattr("icrl_gym.policy.InContextCritic", later_version)
    assert (
        train(small(tmp_path / "another"))
        and PPO.load(tmp_path / "another" / "model.zip").policy.critic.transformer.n_landmarks == 8
    )
    train(TrainConfig(resume=str(path), total_timesteps=1280))
    went_on = PPO.load(path / "model.zip", device="cpu")
    assert went_on.num_timesteps == 1280
    assert went_on.policy.critic.settings == began.settings and went_on.policy.critic.transformer.n_landmarks == 256


def test_the_same_seed_plays_the_same_episodes(tmp_path):
    tables = [(train(small(tmp_path / name)) / "episodes.csv").read_text() for name in ("one", "two")]
    assert tables[0] == tables[1]
    other = (train(small(tmp_path / "three", seed=1)) / "episodes.csv").read_text()
    assert other != tables[0]


def test_a_killed_run_goes_on_from_its_newest_checkpoint(tmp_path):
    folder = RunFolder(tmp_path / "run")
    arguments = [
        "train",
        "--env",
        "Pendulum-v1",
        "--total-timesteps",
        "6144",
        "--gamma",
        "0.9",
        "--n-envs",
        "2",
        "--n-steps",
        "128",
    ]
    arguments += ["--n-epochs", "1", "--checkpoint-freq", "512", "--run-dir", str(folder.path)]
    process = subprocess.Popen([sys.executable, "-m", "icrl_gym", *arguments], stdout=subprocess.DEVNULL, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(folder.checkpoints) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert folder.checkpoints and not folder.finished
    reached = int(folder.checkpoints[-1].name.removeprefix("step_"))
    before = [e for e in folder.read_episodes() if e.timesteps <= reached]

    time.sleep(1.1)  # event files are read in the order of their names, which tell whole seconds
    run = TrainingRun(TrainConfig(resume=str(folder.path)))
    assert run.model.num_timesteps == reached
    normalize = run.model.get_vec_normalize_env()
    assert isinstance(normalize, VecNormalize) and normalize.obs_rms.count > reached * 0.9
    assert sum(len(c) for c in run.env.get_attr("context")) == min(reached, 2 * 8 * 128)
    run.learn()
    assert folder.finished and folder.status["timesteps"] == 6144
    episodes = folder.read_episodes()
    assert episodes[: len(before)] == before and len(episodes) > len(before)
    assert [e.timesteps for e in episodes] == sorted(e.timesteps for e in episodes)
    assert (folder.path / f"progress_{reached}.csv").exists() and (folder.path / "progress_0.csv").exists()
    steps = [
        e.step for e in EventAccumulator(str(folder.path / "tensorboard")).Reload().Scalars("td_error/rollout_rms")
    ]
    assert steps == sorted(set(steps)) and steps[-1] == 6144


def test_a_run_that_begins_again_has_no_trace_of_its_first_beginning(tmp_path):
    whole = RunFolder(train(small(tmp_path / "whole", eval_freq=256, eval_episodes=1)))
    folder = RunFolder(train(small(tmp_path / "run", eval_freq=256, eval_episodes=1)))
    # Killed before its first checkpoint, with everything else already written.
    shutil.rmtree(folder.path / "checkpoints")
    folder.update_status(status="running")
    train(TrainConfig(resume=str(folder.path)))
    assert folder.finished and len(folder.read_episodes()) == len(whole.read_episodes()) > 0
    assert [(e.timesteps, e.episode) for e in folder.read_evaluations()] == [
        (e.timesteps, e.episode) for e in whole.read_evaluations()
    ]
    board = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    steps = [event.step for event in board.Scalars("td_error/rollout_rms")]
    assert steps == sorted(set(steps)) and len(list((folder.path / "tensorboard").iterdir())) == 1


def test_what_another_process_did_since_is_not_done_again(tmp_path):
    config = small(tmp_path / "run", critic="mlp")
    early, late = TrainingRun(config), TrainingRun(config)
    early.learn()
    with pytest.raises(FolderInUseError, match="since this one read it; give the command again"):
        late.learn()
    (early.folder.path / "run.json").unlink()
    early.folder.update_status(status="running")
    shutil.rmtree(early.folder.checkpoints[-1])
    first, second = (TrainingRun(TrainConfig(resume=str(early.folder.path))) for _ in range(2))
    first.learn()
    written = (early.folder.path / "episodes.csv").read_text()
    with pytest.raises(FolderInUseError):
        second.learn()
    assert first.folder.finished and (early.folder.path / "episodes.csv").read_text() == written


def test_leftovers_of_a_killed_process_are_no_run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / ".lock").touch()
    (path / ".partial_config.json").touch()
    folder = RunFolder(train(small(path, critic="none")))
    assert folder.finished and not list(path.glob(".partial_*"))


def test_a_finished_run_has_nothing_to_do_but_may_be_made_longer(tmp_path, capsys):
    path = train(small(tmp_path / "run"))
    written = (path / "run.json").read_text()
    assert main(["train", "--resume", str(path), "--total-timesteps", "1024"]) == 0
    assert "finished before, after 1,024 steps; nothing to do" in capsys.readouterr().out
    assert (path / "run.json").read_text() == written
    assert main(["train", "--resume", str(path), "--total-timesteps", "1280"]) == 0
    assert RunFolder(path).status["timesteps"] == 1280


def test_an_interruption_leaves_a_checkpoint(tmp_path, monkeypatch, capsys):
    from icrl_gym import train as module

    class Interrupting(RunCallback):
        def _on_rollout_end(self):
            super()._on_rollout_end()
            if self.num_timesteps >= 512:
                raise KeyboardInterrupt

    monkeypatch.setattr(module, "RunCallback", Interrupting)
    path = tmp_path / "run"
    arguments = [
        "train",
        "--env",
        "Pendulum-v1",
        "--gamma",
        "0.9",
        "--n-envs",
        "2",
        "--n-steps",
        "128",
        "--run-dir",
        str(path),
    ]
    assert main(arguments) == 130
    assert f"--resume {path}" in capsys.readouterr().err
    assert RunFolder(path).status["status"] == "interrupted"
    assert [p.name for p in RunFolder(path).checkpoints] == ["step_0000000512"]


@pytest.fixture
def pendulum_data(tmp_path):
    """A Minari data set of a random policy on Pendulum, and its folder."""
    minari = pytest.importorskip("minari")
    import gymnasium as gym
    from minari.data_collector import EpisodeBuffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "data"))
        env, buffers = gym.make("Pendulum-v1"), []
        env.action_space.seed(0)
        for seed in range(2):
            actions = [env.action_space.sample() for _ in range(200)]
            first = env.reset(seed=seed)[0]
            observations, rewards, terminations, truncations, _ = zip(*map(env.step, actions), strict=True)
            buffers.append(
                EpisodeBuffer(
                    observations=np.array([first, *observations]), actions=np.array(actions), rewards=np.array(rewards),
                    terminations=np.array(terminations), truncations=np.array(truncations),
                )
            )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Minari asks for an author and a permalink
            minari.create_dataset_from_buffers("pendulum/random-v0", buffers, env=env)
        env.close()
    return "pendulum/random-v0", str(tmp_path / "data")


def test_a_run_with_a_prior_and_a_frozen_critic_is_named_so_and_can_be_resumed(tmp_path, pendulum_data, capsys):
    name, root = pendulum_data
    options = {"cross_fit": False, "prior": (name,), "root": root, "context_rollouts": 4}
    run = TrainingRun(small(tmp_path / "run", **options, total_timesteps=256))
    assert len(run.prior) == 400 and run.config.label() == "Pendulum-v1-in-context+frozen+prior-seed0"
    run.learn()
    critic = run.model.policy.critic
    assert int(critic.context.mask.sum()) == 400  # of a window of 1024
    assert run.folder.config["prior"] == [name] and run.folder.config["cross_fit"] is False
    again = TrainingRun(TrainConfig(resume=str(tmp_path / "run"), total_timesteps=512))
    assert again.prior == run.prior and not again.config.cross_fit and again.config.root == root
    again.learn()
    assert int(again.model.policy.critic.context.mask.sum()) == 656 and again.folder.finished
    for arguments, message in (
        (["--critic", "none", "--prior", name], "--prior belongs to an in-context critic"),
        (["--prior", name, name, "--root", root], "expected 1, got 2"),
        (["--prior", "no/such-v0", "--root", root], "no Minari dataset 'no/such-v0'"),
        (["--env", "MountainCarContinuous-v0", "--prior", name, "--root", root], "states of prior have 3 entries"),
    ):
        env = [] if "--env" in arguments else ["--env", "Pendulum-v1"]
        assert main(["train", *env, "--run-dir", str(tmp_path / "x"), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_settings_reach_the_critic(tmp_path):
    options = CriticConfig(
        kernel="rbf", temperature="0.5", n_layers=3.0, n_landmarks=0, offset="removed", standardize=False
    )
    run = TrainingRun(small(tmp_path / "run", critic_options=options, context_rollouts=2))
    critic = run.model.policy.critic
    assert critic.transformer.n_layers == 3 and critic.transformer.n_landmarks is None and not critic.standardize
    assert float(critic.transformer.kernel.temperature) == 0.5 and critic.transformer.offset == "removed"
    assert run.env.get_attr("length") == [256, 256]
    run.env.close()


def test_meta_world_tasks_by_short_name_and_several_at_once(tmp_path):
    folder = RunFolder(train(small(tmp_path / "run", env=("reach", "drawer-close-v3"), total_timesteps=512)))
    model = PPO.load(folder.path / "model.zip", device="cpu")
    assert model.policy.critic.n_tasks == 2 and model.policy.critic.n_features == 41
    assert bool(model.policy.critic.center_mask.all())
    assert bool((model.policy.critic.coefficients.abs().sum(-1) > 0).all())


def test_a_broken_table_of_episodes_is_read_as_far_as_it_is_whole(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_episodes([Episode(10, 1.5, 10, None), Episode(20, -2.0, 10, 1.0)])
    with (tmp_path / "episodes.csv").open("a") as stream:
        stream.write("30,-1")  # killed while writing
    assert folder.read_episodes() == [Episode(10, 1.5, 10, None), Episode(20, -2.0, 10, 1.0)]
    folder.drop_episodes_after(10)
    assert folder.read_episodes() == [Episode(10, 1.5, 10, None)]


# Intervals


def test_intervals_and_bins():
    low, high = bootstrap_interval([1.0, 2.0, 3.0])
    assert 1.0 <= low < 2.0 < high <= 3.0
    assert bootstrap_interval([2.0, 2.0]) == (2.0, 2.0)
    assert all(np.isnan(bootstrap_interval([1.0])))
    edges = np.array([0.0, 10.0, 20.0, 30.0])
    np.testing.assert_array_equal(binned([1, 10, 11, 30], [1.0, 3.0, 5.0, 7.0], edges), [2.0, 5.0, 7.0])
    np.testing.assert_array_equal(binned([25], [4.0], edges), [np.nan, np.nan, 4.0])


# At the door


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--env", "reech-v3"], "unknown environment 'reech-v3'.*Did you mean.*reach-v3"),
        (["--env", "Pendulm-v1"], "unknown environment 'Pendulm-v1'.*Pendulum-v1"),
        (["--env", "reach-v3", "Pendulum-v1"], "Pendulum-v1"),
        (["--gamma", "1.5"], r"--gamma must lie in \[0, 1\], got 1.5"),
        (["--gae-lambda", "-0.1"], r"--gae-lambda must lie in \[0, 1\]"),
        (["--n-steps", "0"], "--n-steps must be positive, got 0"),
        (["--batch-size", "100"], "--batch-size 100 must divide a rollout of n_steps"),
        (["--temperature", "warm"], '--temperature must be a positive number or "median"'),
        (["--temperature", "-1"], "temperature must be positive and finite"),
        (["--kernel", "softmax"], "Use n_landmarks=None|n_landmarks=None"),
        (["--n-layers", "2.5"], "n_layers must be a whole number"),
        (["--critic", "mlp", "--kernel", "rbf"], "takes none of the in-context critic's settings"),
        (["--resume", "nowhere"], "no run at 'nowhere'"),
        (["--learning-rate", "0"], "--learning-rate must be positive"),
        (["--max-episode-steps", "900"], "500"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys, monkeypatch):
    import re

    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and error.startswith("icrl-gym: error: ") and "Traceback" not in error
    assert re.search(message, error), error
    assert not (tmp_path / "runs").exists()


def test_images_and_odd_actions_are_refused(tmp_path, capsys):
    import gymnasium as gym

    class Camera(gym.Env):
        metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
        observation_space = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)

    class Odd(Camera):
        observation_space = gym.spaces.Box(-1, 1, (2,))
        action_space = gym.spaces.Tuple([gym.spaces.Discrete(2)])

    for name, cls, message in (("Camera", Camera, "is an image"), ("Odd", Odd, "PPO cannot act in")):
        gym.register(f"icrl_gym_tests/{name}-v0", cls)
        assert main(["train", "--env", f"icrl_gym_tests/{name}-v0", "--run-dir", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_an_id_that_a_module_registers_is_imported_with_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "their_envs.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('Theirs-v0', 'gymnasium.envs.classic_control:PendulumEnv', max_episode_steps=20)\n"
    )
    arguments = ["train", "--critic", "none", "--n-envs", "2", "--n-steps", "32", "--total-timesteps", "64", "--env"]
    assert main([*arguments, "their_envs:Theirs-v0"]) == 2
    assert "No module named 'their_envs'. Expected MODULE:ID" in capsys.readouterr().err
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*arguments, "their_envs:Theirs-v7"]) == 2
    assert "neither a Meta-World task nor a registered Gymnasium id" in capsys.readouterr().err
    assert main([*arguments, "their_envs:Theirs-v0", "--run-dir", str(tmp_path / "run")]) == 0
    assert len(RunFolder(tmp_path / "run").read_episodes()) == 2


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "thing").write_text("mine")
    assert main(["train", "--run-dir", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["thing"]


def test_a_resumed_run_keeps_its_settings(tmp_path, capsys):
    path = train(small(tmp_path / "run"))
    assert main(["train", "--resume", str(path), "--gamma", "0.5"]) == 2
    assert "--gamma is 0.9 there and cannot become 0.5" in capsys.readouterr().err


def test_layers_that_diverge_are_the_user_s_to_mend(tmp_path, capsys):
    arguments = [
        "train",
        "--env",
        "Pendulum-v1",
        "--run-dir",
        str(tmp_path / "run"),
        "--n-envs",
        "2",
        "--n-steps",
        "64",
    ]
    arguments += ["--n-layers", "60", "--step-sizes", "3", "--step-normalization", "none", "--total-timesteps", "512"]
    assert main(arguments) == 2
    assert "diverge" in capsys.readouterr().err
    assert RunFolder(tmp_path / "run").status["status"].startswith("failed")


def test_the_command_says_where_to_go():
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "icrl_gym", *arguments], capture_output=True, text=True)

    help_text = run("--help").stdout
    assert "train" in help_text and "benchmark" in help_text and "tensorboard --logdir" in help_text
    assert run("--version").stdout.startswith("icrl-gym 0.")
    wrong = run("train", "--gamma", "2")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert run("trane").returncode == 2

"""The command line's own promises: what repeats, what was meant, what Ctrl-C leaves behind, and who gets a traceback."""

import os
import shutil
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest

import icrl_gym.benchmark as benchmark_module
from icrl_gym import cli, train_callbacks
from icrl_gym.benchmark import BenchmarkConfig, benchmark
from icrl_gym.cli import _joined, main
from icrl_gym.runs import Episode, RunFolder, load_contexts
from icrl_gym.train import TrainConfig, TrainingRun, train

SMALL = ["--n-envs", "2", "--n-steps", "64", "--n-epochs", "1", "--gamma", "0.9", "--total-timesteps", "256"]
PENDULUM = ["train", "--env", "Pendulum-v1", *SMALL]


def small(path, **options):
    settings = {"n_envs": 2, "n_steps": 64, "n_epochs": 1, "gamma": 0.9, "total_timesteps": 256}
    return TrainConfig(**{**settings, "env": ("Pendulum-v1",), "run_dir": str(path), **options})


class Blank(gym.Env):
    """Says nothing and ends never; the base of odd spaces."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (SB3 asks for it)
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


class Camera(Blank):
    observation_space = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)


class Parts(Blank):
    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Discrete(3)})


@pytest.fixture
def odd_environments():
    ids = {cls: f"icrl_gym_tests/Cli{cls.__name__}-v0" for cls in (Camera, Parts)}
    for cls, name in ids.items():
        gym.register(name, cls, max_episode_steps=20)
    yield ids
    for name in ids.values():
        del gym.registry[name]


# What was meant


@pytest.mark.parametrize(
    "words, joined",
    [
        ("train --env a", "train --env a"),
        ("train --env a b --seed 1", "train --env a b --seed 1"),
        ("train --env a --seed 1 --env b", "train --env a b --seed 1"),
        ("train --env=a --env=b --seed 1", "train --env a b --seed 1"),
        ("train --env a b --seed 1 --env c d", "train --env a b c d --seed 1"),
        ("benchmark --envs a --envs b", "benchmark --envs a --envs b"),
    ],
)
def test_an_option_given_twice_is_given_once_with_both(words, joined):
    assert _joined(words.split(), "--env") == joined.split()


@pytest.mark.parametrize(
    "words",
    [["--env", "reach", "drawer-close"], ["--env", "reach", "--env", "drawer-close"], ["--env", "reach,drawer-close"]],
)
def test_several_tasks_may_be_written_in_three_ways(words, tmp_path, monkeypatch):
    seen = []

    def stop(config, given=None):
        seen.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(cli, "TrainingRun", stop)
    assert main(["train", *words, "--run-dir", str(tmp_path / "run")]) == 2
    assert seen[0].env == ("reach", "drawer-close")


def test_switches(tmp_path):
    assert main([*PENDULUM, "--no-normalize", "--use-sde", "--run-dir", str(tmp_path / "run")]) == 0
    folder = RunFolder(tmp_path / "run")
    assert folder.config["normalize"] is False and folder.config["use_sde"] is True
    assert not (folder.path / "vecnormalize.pkl").exists()
    run = TrainingRun(TrainConfig(resume=str(folder.path), total_timesteps=512))
    assert run.model.use_sde
    run.env.close()


def test_settings_given_with_resume_count_even_where_they_are_a_default(tmp_path, capsys):
    path = train(small(tmp_path / "run"))
    # 0.99 and True are defaults: that a user typed them shows only on the command line
    assert main(["train", "--resume", str(path), "--gamma", "0.99"]) == 2
    assert "--gamma is 0.9 there and cannot become 0.99" in capsys.readouterr().err
    assert main(["train", "--resume", str(path), "--kernel", "rbf"]) == 2
    assert "--kernel is None there and cannot become 'rbf'" in capsys.readouterr().err
    assert main(["train", "--resume", str(path), "--gamma=0.9", "--normalize"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    default = TrainConfig().total_timesteps
    run = TrainingRun(TrainConfig(resume=str(path)), given={"resume", "total_timesteps"})
    assert not run.done and run.config.total_timesteps == default
    run.env.close()


def test_a_resumed_run_does_not_replay_its_first_episodes(tmp_path):
    run = TrainingRun(small(tmp_path / "run"))
    run.env.reset()
    first = run.env.get_original_obs()
    run.learn()

    def resumed():
        again = TrainingRun(TrainConfig(resume=str(tmp_path / "run"), total_timesteps=512))
        again.env.reset()
        observation = again.env.get_original_obs()
        again.env.close()
        return observation

    assert np.abs(resumed() - first).max() > 0.01
    np.testing.assert_array_equal(resumed(), resumed())


# Whole files


def test_dropping_episodes_keeps_the_old_table_until_the_new_one_is_whole(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.append_episodes([Episode(10, 1.5, 10, None), Episode(20, -2.0, 10, 1.0)])
    before = (tmp_path / "episodes.csv").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        folder.drop_episodes_after(10)
    assert (tmp_path / "episodes.csv").read_bytes() == before
    folder.drop_episodes_after(10)
    assert (tmp_path / "episodes.csv").read_bytes() == before.splitlines(keepends=True)[0] + b"10,1.5,10,\r\n"


def test_a_row_that_lost_digits_of_its_length_is_no_row(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_episodes([Episode(10, 1.5, 10, None)])
    with (tmp_path / "episodes.csv").open("a") as stream:
        stream.write("30,-1.5,20")  # of 200: killed while writing
    assert folder.read_episodes() == [Episode(10, 1.5, 10, None)]


def test_what_a_killed_process_left_half_written_is_swept(tmp_path):
    path = train(small(tmp_path / "run"))
    (path / "checkpoints" / ".partial_1").mkdir()
    (path / "checkpoints" / ".partial_1" / "model.zip").write_text("half")
    (path / ".partial_model.zip").write_text("half")
    train(TrainConfig(resume=str(path), total_timesteps=384))
    assert not list(path.rglob(".partial*"))


@pytest.mark.parametrize("vec_env", ["dummy", "subproc"])
def test_ctrl_c_leaves_a_whole_run_also_with_worker_processes(vec_env, tmp_path):
    folder = RunFolder(tmp_path / "run")
    arguments = [*PENDULUM, "--total-timesteps", "400000", "--vec-env", vec_env, "--checkpoint-freq", "400000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "icrl_gym", *arguments, "--run-dir", str(folder.path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,  # a group of its own, as in a terminal, where Ctrl-C reaches the workers too
    )
    deadline = time.monotonic() + 120
    while not folder.read_episodes() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error, error
    assert f"--resume {folder.path}" in error
    reached = folder.status["timesteps"]
    assert folder.status["status"] == "interrupted" and folder.checkpoints[-1].name == f"step_{reached:010d}"
    assert sum(map(len, load_contexts(folder.checkpoints[-1] / "contexts.npz"))) == min(reached, 2 * 64 * 8)
    assert len(folder.read_episodes()) == 2 * (reached // 400)
    folder.write_config({**folder.config, "total_timesteps": reached + 128})  # 400,000 would take minutes
    train(TrainConfig(resume=str(folder.path)))
    assert folder.finished


def test_a_second_ctrl_c_stops_at_once_and_saves_nothing(tmp_path, monkeypatch):
    def twice(self):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return True

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(train_callbacks.RunCallback, "_on_step", twice)
    assert main([*PENDULUM, "--run-dir", str(tmp_path / "run")]) == 130
    folder = RunFolder(tmp_path / "run")
    assert folder.status["status"] == "interrupted" and not folder.checkpoints
    assert signal.getsignal(signal.SIGINT) is before


# Progress


@pytest.mark.parametrize("out, err, bar", [(True, False, True), (False, True, False)])
def test_the_bar_is_for_a_terminal_at_stdout(out, err, bar, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: out, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: err, raising=False)
    assert isinstance(train_callbacks.progress_callback(small(tmp_path)), train_callbacks.ProgressBarCallback) == bar


def test_without_its_extra_there_is_one_line_instead_of_a_bar(monkeypatch, tmp_path, capsys):
    def missing():
        raise ImportError("tqdm")

    monkeypatch.setattr(train_callbacks, "ProgressBarCallback", missing)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(train_callbacks.progress_callback(small(tmp_path)), train_callbacks.Lines)
    assert capsys.readouterr().out == 'no progress bar: pip install "icrl-gym[progress]" for one.\n'


# At the door


def test_without_matplotlib_a_run_leaves_its_tables_and_says_what_draws(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.warns(UserWarning, match=r"icrl-gym\[plots\]"):
        assert main([*PENDULUM, "--run-dir", str(tmp_path / "run")]) == 0
    assert "no learning_curve.png without matplotlib" in capsys.readouterr().out
    folder = RunFolder(tmp_path / "run")
    assert (
        folder.finished and (folder.path / "model.zip").exists() and not (folder.path / "learning_curve.png").exists()
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "foo"], "--device must be"),
        (["--batch-size", "1"], "--batch-size must be at least 2"),
        (["--clip-range", "-1"], "--clip-range must be positive"),
        (["--run-dir", "file"], "'file' is not a folder that can be written to"),
        (["--run-dir", "file/run"], "'file' is not a folder that can be written to"),
        (["--resume", "broken"], "config.json' is not what `icrl-gym train` writes there"),
        (["--env", "CartPole-v1", "--use-sde"], "continuous"),
        (["--env", ","], "--env needs at least one name"),
    ],
)
def test_more_of_what_a_user_gets_wrong(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"a')
    given = [] if "--resume" in arguments else SMALL
    assert main(["train", *given, *([] if "--env" in arguments else ["--env", "Pendulum-v1"]), *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("icrl-gym: error: ") and "\n" not in error and message in error, error


@pytest.mark.parametrize("critic", ["in-context", "mlp"])
def test_images_are_refused_and_dictionaries_taken_by_both_critics(critic, odd_environments, tmp_path, capsys):
    arguments = ["train", "--critic", critic, *SMALL, "--run-dir"]
    assert main([*arguments, str(tmp_path / "camera"), "--env", odd_environments[Camera]]) == 2
    assert "is an image" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "parts"), "--env", odd_environments[Parts]]) == 0


# Comparing


def test_the_benchmark_says_what_is_wrong_before_it_runs_anything(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark_module, "_run_all", lambda *_: pytest.fail("ran"))
    for wrong, message in ((["--envs", "Pendulm-v1"], "unknown environment"), (["--kernel", "softmax"], "n_landmarks")):
        assert main(["benchmark", "--envs", "Pendulum-v1", *SMALL, *wrong, "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _second_fails(function, run):
    """Stands in for a process of its own."""
    if run.seed == 1:
        raise ValueError("inside")
    return function(run)


def test_a_run_that_fails_inside_keeps_its_traceback_and_the_others_their_results(tmp_path, monkeypatch):
    options = {"envs": ("Pendulum-v1",), "critics": ("mlp",), "n_envs": 2, "n_steps": 64, "n_epochs": 1, "jobs": 1}
    config = BenchmarkConfig(**options, seeds=3, total_timesteps=128, out=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(benchmark_module, "in_own_process", _second_fails)
        with pytest.raises(RuntimeError, match="Pendulum-v1-mlp-seed1 failed") as caught:
            benchmark(config)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not isinstance(caught.value, cli.USER_ERRORS)
    done = [RunFolder(tmp_path / "runs" / f"Pendulum-v1-mlp-seed{seed}").finished for seed in range(3)]
    assert done == [True, False, True]


def test_runs_made_before_a_setting_existed_had_its_default(tmp_path):
    import json

    options = {"envs": ("Pendulum-v1",), "critics": ("mlp",), "n_envs": 2, "n_steps": 64, "n_epochs": 1, "seeds": 1}
    run = BenchmarkConfig(**options, total_timesteps=128, out=str(tmp_path)).runs()[0]
    train(run)
    file = tmp_path / "runs" / "Pendulum-v1-mlp-seed0" / "config.json"
    stored = json.loads(file.read_text())
    del stored["use_sde"]
    file.write_text(json.dumps(stored))
    benchmark(BenchmarkConfig(**options, total_timesteps=128, out=str(tmp_path)))
    with pytest.raises(ValueError, match="--use-sde False, not True"):
        benchmark(BenchmarkConfig(**options, total_timesteps=128, out=str(tmp_path), use_sde=True))


def test_tasks_joined_by_a_comma_are_one_experiment():
    runs = BenchmarkConfig(envs=("reach,drawer-close", "Pendulum-v1"), critics=("mlp",), seeds=1, out="out").runs()
    assert [run.env for run in runs] == [("reach", "drawer-close"), ("Pendulum-v1",)]
    assert runs[0].run_dir.endswith("reach+drawer-close-mlp-seed0")


def test_an_interrupted_benchmark_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark_module, "_run_all", interrupted)
    assert main(["benchmark", "--envs", "Pendulum-v1", *SMALL, "--out", str(tmp_path)]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_a_run_goes_on_to_its_end_or_further_never_less_far(tmp_path, capsys):
    path = tmp_path / "run"
    assert main([*PENDULUM, "--run-dir", str(path)]) == 0
    config = (path / "config.json").read_text()
    assert main(["train", "--resume", str(path), "--total-timesteps", "128"]) == 2
    assert "can be raised, not lowered" in capsys.readouterr().err
    assert (path / "config.json").read_text() == config


@pytest.mark.parametrize("damage", ["truncated", "missing"])
@pytest.mark.parametrize("name", ["model.zip", "vecnormalize.pkl", "contexts.npz"])
def test_a_checkpoint_that_is_not_whole_is_named_and_the_one_before_it_serves(name, damage, tmp_path, capsys):
    path = tmp_path / "run"
    assert main([*PENDULUM, "--checkpoint-freq", "128", "--run-dir", str(path)]) == 0
    _, newest = RunFolder(path).checkpoints
    if damage == "missing":
        (newest / name).unlink()
    else:
        (newest / name).write_bytes((newest / name).read_bytes()[:200])
    resume = ["train", "--resume", str(path), "--total-timesteps", "384"]
    assert main(resume) == 2
    said = capsys.readouterr().err
    assert f"the checkpoint '{newest}' cannot be read" in said and "Delete that folder" in said
    shutil.rmtree(newest)
    assert main(resume) == 0
    assert RunFolder(path).status["timesteps"] == 384


@pytest.mark.parametrize("name", ["config.json", "run.json"])
@pytest.mark.parametrize("content", [b"[]", b'{"a"', b"\xff\xfe", b"{}"])
def test_a_folder_with_a_damaged_table_says_which(name, content, tmp_path, capsys):
    path = tmp_path / "run"
    assert main([*PENDULUM, "--run-dir", str(path)]) == 0
    (path / name).write_bytes(content)
    harmless = (name, content) == ("run.json", b"{}")  # as if the run had never ended
    assert main(["train", "--resume", str(path), "--total-timesteps", "384"]) == (0 if harmless else 2)
    assert harmless or name in capsys.readouterr().err


def test_two_processes_in_one_folder(tmp_path, capsys):
    path = tmp_path / "run"
    with RunFolder(path).lock():
        assert main([*PENDULUM, "--run-dir", str(path)]) == 2
    assert "another process is at work" in capsys.readouterr().err
    assert main([*PENDULUM, "--run-dir", str(path)]) == 0


@pytest.mark.parametrize("n_tasks, n_envs", [(1, 4), (2, 4), (3, 6), (4, 8), (5, 10)])
def test_several_tasks_have_equally_many_environments(n_tasks, n_envs):
    assert TrainConfig(env=("a",) * n_tasks).n_envs == n_envs
    assert TrainConfig(env=("a",) * n_tasks, n_envs=2).n_envs == 2

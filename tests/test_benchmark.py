"""Evaluations that leave no trace, critics by name, statistics against hand calculations, and a report that hides nothing."""

import csv
import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from scipy import stats
from stable_baselines3.common.vec_env import VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from icrl_gym.benchmark import BenchmarkConfig, benchmark
from icrl_gym.cli import main
from icrl_gym.critic_choices import CRITICS, CriticConfig
from icrl_gym.evaluation import evaluation_seed, randomness_untouched
from icrl_gym.runs import EvaluationEpisode, FolderInUseError, RunFolder
from icrl_gym.statistics import (
    interquartile_mean,
    normalized,
    performance_profile,
    probability_of_improvement,
    stratified_interval,
    stratified_resamples,
    time_average,
)
from icrl_gym.tables import with_interval
from icrl_gym.train import TrainConfig, TrainingRun, train
from icrl_gym.train_envs import make_evaluation_env, make_training_env

SMALL = {"n_envs": 2, "n_steps": 64, "n_epochs": 1, "gamma": 0.9, "total_timesteps": 256, "checkpoint_freq": 128}


def small(path, **options):
    return TrainConfig(**{**SMALL, "env": ("Pendulum-v1",), "run_dir": str(path), "eval_episodes": 3, **options})


# Evaluations


@pytest.mark.parametrize("critic", CRITICS)
def test_an_evaluation_leaves_no_trace_in_the_training(critic, tmp_path):
    def trained(eval_freq):
        run = TrainingRun(small(tmp_path / str(eval_freq), critic=critic, eval_freq=eval_freq))
        run.learn()
        return run

    without, evaluated = trained(0), trained(100)
    expected, state = without.model.policy.state_dict(), evaluated.model.policy.state_dict()
    assert expected.keys() == state.keys() and all(torch.equal(expected[name], state[name]) for name in expected)
    assert not (without.folder.path / "evaluations.csv").exists()
    assert without.folder.read_episodes() == evaluated.folder.read_episodes()
    rows = evaluated.folder.read_evaluations()
    assert [(row.timesteps, row.episode) for row in rows] == [(t, i) for t in (0, 128, 256) for i in range(3)]
    assert {(row.task, row.length, row.success) for row in rows} == {("Pendulum-v1", 200, None)}


def test_what_an_evaluation_says_is_what_the_policy_does(tmp_path):
    run = TrainingRun(small(tmp_path / "run", eval_freq=256))
    run.learn()
    env = make_evaluation_env(run.config)
    env.obs_rms = run.model.get_vec_normalize_env().obs_rms
    env.seed(evaluation_seed(0))
    observations, returns = env.reset(), np.zeros(3)
    for _ in range(200):
        observations, rewards, _, _ = env.step(run.model.predict(observations, deterministic=True)[0])
        returns += rewards
    np.testing.assert_allclose([row.episode_return for row in run.folder.read_evaluations()[-3:]], returns, rtol=1e-4)
    events = EventAccumulator(str(run.folder.path / "tensorboard")).Reload()
    scalars = events.Scalars("eval/mean_reward")
    assert [event.step for event in scalars] == [0, 256]
    assert scalars[-1].value == pytest.approx(returns.mean(), rel=1e-4)


def test_evaluation_goals_are_held_out_and_the_same_every_time():
    options = {"env": ("reach",), "n_envs": 2, "n_steps": 64, "eval_episodes": 2}
    configs = [TrainConfig(**options, critic=critic) for critic in ("in-context", "none")]
    training = make_training_env(configs[0])
    held_out = [make_evaluation_env(config) for config in configs]

    def goals(env, n):
        bare = env.venv if isinstance(env, VecNormalize) else env
        return [tuple(bare.reset()[index, -3:].tolist()) for _ in range(n) for index in range(bare.num_envs)]

    first = []
    for env in (held_out[0], held_out[0], held_out[1]):
        env.seed(evaluation_seed(0))
        first.append(goals(env, 2))
    assert first[0] == first[1] == first[2] and len(set(first[0])) > 2
    assert not set(goals(training, 10)) & set(goals(held_out[0], 10))
    for env in (training, *held_out):
        env.close()
    assert len({evaluation_seed(seed) for seed in range(1000)}) == 1000 and evaluation_seed(0) > 10_000


def test_random_generators_go_on_as_if_nothing_had_been_drawn():
    def draw():
        return np.random.rand(), float(torch.rand(()))  # noqa: NPY002

    with randomness_untouched(3):
        inside = draw()
        expected = None
    with randomness_untouched():
        expected = draw()
    with randomness_untouched(3):
        assert draw() == inside
    assert draw() == expected != inside


@pytest.mark.parametrize("critic", ["in-context", "recurrent"])
def test_a_resumed_run_repeats_no_evaluation_and_drops_those_after_its_checkpoint(critic, tmp_path):
    path = train(small(tmp_path / "run", critic=critic, eval_freq=128))
    folder = RunFolder(path)
    before = folder.read_evaluations()
    assert sorted({row.timesteps for row in before}) == [0, 128, 256]
    # As if it had been killed after the evaluation at 256, before the checkpoint there.
    shutil.rmtree(folder.checkpoints[-1])
    folder.update_status(status="running")
    assert folder.checkpoints[-1].name == "step_0000000128"
    train(TrainConfig(resume=str(path)))
    after = folder.read_evaluations()
    assert after[:6] == before[:6]
    assert [(row.timesteps, row.episode) for row in after] == [(row.timesteps, row.episode) for row in before]


def test_several_tasks_are_evaluated_one_by_one(tmp_path):
    config = small(
        tmp_path / "run", env=("reach", "drawer-close"), eval_freq=256, eval_episodes=2, max_episode_steps=20
    )
    rows = RunFolder(train(config)).read_evaluations()
    last = [row for row in rows if row.timesteps == 256]
    assert [row.task for row in last] == ["reach-v3", "drawer-close-v3"] * 2
    assert {row.length for row in last} == {20} and all(row.success in (0.0, 1.0) for row in last)


def test_a_damaged_table_of_evaluations_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    row = EvaluationEpisode(10, 0, "a", 1.5, 7, None)
    folder.append_evaluation([row])
    assert folder.read_evaluations() == [row]
    (tmp_path / "evaluations.csv").write_text("timesteps\n10\n")
    with pytest.raises(ValueError, match=r"evaluations.csv' is not what"):
        folder.read_evaluations()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--eval-freq", "-1"], "--eval-freq must be at least 0"),
        (["--eval-episodes", "0"], "--eval-episodes must be positive"),
        (["--critic", "paper", "--kernel", "rbf"], "--critic paper takes none"),
        (["--critic", "none", "--n-layers", "3"], "--critic none takes none"),
    ],
)
def test_what_a_user_gets_wrong(arguments, message, tmp_path, capsys):
    assert main(["train", "--env", "Pendulum-v1", "--run-dir", str(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err


# Critics


def test_the_critic_none_is_the_value_zero_without_a_parameter(tmp_path):
    run = TrainingRun(small(tmp_path / "run", critic="none"))
    run.learn()
    buffer = run.model.rollout_buffer
    assert not buffer.values.any()
    assert not [name for name, _ in run.model.policy.named_parameters() if "value" in name]
    # Discounted sums of rewards, backwards; Pendulum has no terminations, and a time limit adds gamma times zero.
    expected, ahead = np.zeros_like(buffer.rewards), np.zeros(2)
    starts = np.vstack([buffer.episode_starts[1:], run.model._last_episode_starts])
    for step in reversed(range(64)):
        ahead = buffer.rewards[step] + 0.9 * 0.95 * (1 - starts[step]) * ahead
        expected[step] = ahead
    np.testing.assert_allclose(buffer.advantages.reshape(2, 64).T, expected, rtol=1e-4, atol=1e-5)


def test_the_critic_paper_is_what_the_page_says(tmp_path):
    run = TrainingRun(small(tmp_path / "run", critic="paper"))
    transformer = run.model.policy.critic.transformer
    assert transformer.n_layers == 20 and transformer.n_landmarks is None and not transformer.value_shift
    assert transformer.step_normalization == "row_sum" and transformer.offset == "centered"
    assert not run.model.policy.critic.standardize and run.env.get_attr("length") == [512, 512]
    run.env.close()


def test_without_sb3_contrib_the_recurrent_critic_says_what_is_missing(tmp_path, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    assert main(["train", "--env", "Pendulum-v1", "--critic", "recurrent", "--run-dir", str(tmp_path / "run")]) == 2
    assert "pip install sb3-contrib" in capsys.readouterr().err


# Statistics


def test_aggregates_against_scipy_and_by_hand():
    rng = np.random.default_rng(0)
    scores = [rng.normal(size=4), rng.normal(size=6)]
    others = [rng.normal(size=5), rng.normal(size=3)]
    together = np.sort(np.concatenate(scores))
    assert interquartile_mean(scores) == pytest.approx(together[2:8].mean())
    expected = np.mean(
        [stats.mannwhitneyu(x, y).statistic / (len(x) * len(y)) for x, y in zip(scores, others, strict=True)]
    )
    assert probability_of_improvement(scores, others) == pytest.approx(expected)
    assert probability_of_improvement(scores, scores) == pytest.approx(0.5)
    assert probability_of_improvement([[], [1.0]], [[3.0], [0.0]]) == 1.0
    with pytest.raises(ValueError, match="same tasks"):
        probability_of_improvement(scores, others[:1])
    taus = np.array([-1.0, 0.0, 1.0])
    by_hand = [np.mean([sum(x > tau for x in task) / len(task) for task in scores]) for tau in taus]
    np.testing.assert_allclose(performance_profile(scores, taus), by_hand)
    assert math.isnan(interquartile_mean([[]])) and np.isnan(performance_profile([[]], taus)).all()


def test_the_area_under_a_curve_and_its_unit():
    t, v = [0.0, 1.0, 4.0], [0.0, 2.0, 5.0]
    assert time_average(t, v) == pytest.approx((1.0 + 3.5 * 3) / 4)
    assert time_average([3], [7.0]) == 7.0 and math.isnan(time_average([], []))
    np.testing.assert_allclose(normalized([2.0, 4.0], 4.0), [0.5, 1.0])
    np.testing.assert_allclose(normalized([-2.0, -8.0], -4.0), [1.5, 0.0])
    assert np.isnan(normalized([1.0], 0.0)).all()


def test_resampling_stays_within_tasks_and_its_interval_is_that_of_the_mean():
    scores = [[0.0, 1.0, 2.0], [10.0, 11.0]]
    draws = [stratified_resamples(scores, np.random.default_rng(seed)) for seed in range(50)]
    assert all(set(a) <= {0.0, 1.0, 2.0} and set(b) <= {10.0, 11.0} and len(a) == 3 for a, b in draws)
    # A mean over one task of many runs has a normal interval.
    runs = np.random.default_rng(1).normal(size=400)
    low, high = stratified_interval(lambda s: float(np.mean(s[0])), [runs])
    half = 1.96 * runs.std() / 20
    assert float(high - low) == pytest.approx(2 * half, rel=0.1)
    assert np.isnan(stratified_interval(interquartile_mean, [[1.0], [2.0]])).all()


# The report


def read_rows(out):
    return list(csv.DictReader((out / "results.csv").read_text().splitlines()))


def test_critics_are_compared_and_finished_runs_kept_also_in_their_small_form(tmp_path, capsys):
    options = {**SMALL, "seeds": 2, "jobs": 2, "envs": ("Pendulum-v1",), "out": str(tmp_path / "out")}
    options |= {"eval_freq": 128, "eval_episodes": 2}
    out = benchmark(BenchmarkConfig(**options))
    rows = read_rows(out)
    assert [(r["env"], r["critic"], r["seeds"]) for r in rows] == [
        ("Pendulum-v1", "in-context", "2"),
        ("Pendulum-v1", "mlp", "2"),
    ]
    folder = RunFolder(out / "runs" / "Pendulum-v1-mlp-seed1")
    means = [np.mean([r.episode_return for r in folder.read_evaluations() if r.timesteps == t]) for t in (0, 128, 256)]
    assert float(rows[1]["final return by seed"].split(" / ")[1]) == pytest.approx(means[-1], rel=1e-4)
    area = (means[0] + 2 * means[1] + means[2]) / 4
    assert float(rows[1]["AUC by seed"].split(" / ")[1]) == pytest.approx(area, rel=1e-4)
    report = (out / "results.md").read_text()
    assert "| Pendulum-v1 | mlp | 2 |" in report and "P(> mlp)" in report and "not finished" not in report
    for figure in ("learning_curves.png", "performance_profile.png"):
        assert (out / figure).stat().st_size > 1000 and figure in report
    capsys.readouterr()
    for run in (out / "runs").iterdir():
        for path in run.iterdir():
            if path.name not in ("config.json", "run.json", "episodes.csv", "evaluations.csv"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    (out / "results.md").unlink()
    benchmark(BenchmarkConfig(**options))
    assert "4 finished before, 0 to go" in capsys.readouterr().out
    assert (out / "results.md").read_text() == report and read_rows(out) == rows
    with pytest.raises(ValueError, match=r"holds a run with --gamma 0.9, not 0.5"):
        benchmark(BenchmarkConfig(**{**options, "gamma": 0.5}))
    with pytest.raises(ValueError, match=r"in-context-seed0 holds a run with --context-rollouts 8, not 3"):
        benchmark(BenchmarkConfig(**options, context_rollouts=3))
    # A run without a context has no length of it.
    benchmark(BenchmarkConfig(**{**options, "critics": ("mlp",)}, context_rollouts=3))
    assert "2 finished before, 0 to go" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no checkpoints any more, so it cannot be made longer"):
        TrainingRun(TrainConfig(resume=str(folder.path), total_timesteps=512))
    assert folder.read_evaluations()


def test_what_has_not_finished_is_named(tmp_path):
    options = {**SMALL, "seeds": 2, "envs": ("Pendulum-v1",), "critics": ("mlp",), "out": str(tmp_path), "eval_freq": 0}
    config = BenchmarkConfig(**options, report_only=True)
    with pytest.raises(ValueError, match="no run of these has finished"):
        benchmark(config)
    train(config.runs()[1])
    benchmark(config)
    report = (tmp_path / "results.md").read_text()
    assert "1 of 2 runs have not finished" in report and "- Pendulum-v1-mlp-seed0: not started" in report
    assert "stretches of training episodes" in report and not (tmp_path / "runs" / "Pendulum-v1-mlp-seed0").exists()


MORTAL = """
import os
from multiprocessing import parent_process
from pathlib import Path

import gymnasium as gym
from gymnasium.envs.classic_control import PendulumEnv


class Mortal(PendulumEnv):
    # Kills its process in the middle of the first run that trains with it, after a checkpoint.
    steps = 0

    def step(self, action):
        self.steps += 1
        mark = Path(os.environ["MORTAL"])
        if self.steps == 100 and parent_process() is not None and not mark.exists():
            mark.touch()
            os._exit(1)
        return super().step(action)


gym.register("Mortal-v0", Mortal, max_episode_steps=20)
"""


def test_a_killed_worker_fails_its_own_run_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "mortal_env.py").write_text(MORTAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MORTAL", str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    arguments = [
        "benchmark",
        "--envs",
        "mortal_env:Mortal-v0",
        "--critics",
        "mlp",
        "none",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    for name, value in {**SMALL, "eval_freq": 0}.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    assert main([*arguments, "--out", str(out)]) == 1
    assert "mlp-seed0: its process died" in capsys.readouterr().err
    report = (out / "results.md").read_text()
    assert "1 of 2 runs have not finished" in report and "-mlp-seed0: running, 0 steps at its last" in report
    (folder,) = map(RunFolder, (out / "runs").glob("*mlp-seed0"))
    assert [p.name for p in folder.checkpoints] == ["step_0000000128"] and not folder.finished
    assert main([*arguments, "--out", str(out)]) == 0
    assert "2 runs, 1 finished before, 1 to go" in capsys.readouterr().out
    assert folder.finished and "not finished" not in (out / "results.md").read_text()


def test_a_second_benchmark_leaves_a_run_that_is_at_work_alone(tmp_path, capsys):
    options = {**SMALL, "seeds": 1, "envs": ("Pendulum-v1",), "critics": ("mlp", "none"), "eval_freq": 0, "jobs": 1}
    config = BenchmarkConfig(**options, out=str(tmp_path))
    first = TrainingRun(config.runs()[0])
    first.folder.write_config(json.loads(json.dumps(dataclasses.asdict(first.config))))  # begun, before any checkpoint
    (first.folder.path / "mine").touch()
    with first.folder.lock(), pytest.raises(FolderInUseError, match="mlp-seed0: another process"):
        benchmark(config)
    assert (first.folder.path / "mine").exists() and not first.folder.finished
    assert [row["critic"] for row in read_rows(tmp_path)] == ["none"]  # the other went on
    benchmark(config)
    assert first.folder.finished and (first.folder.path / "mine").exists()


def test_aggregates_are_over_the_tasks_that_all_critics_have(tmp_path):
    envs = ("Pendulum-v1", "MountainCarContinuous-v0")
    options = {**SMALL, "n_steps": 1024, "total_timesteps": 2048, "checkpoint_freq": 2048, "eval_freq": 0, "seeds": 2}
    config = BenchmarkConfig(**options, envs=envs, critics=("mlp", "none"), out=str(tmp_path), report_only=True)
    runs = {run.label(): run for run in config.runs()}
    for label in ("Pendulum-v1-mlp-seed0", "Pendulum-v1-none-seed0", "MountainCarContinuous-v0-mlp-seed0"):
        train(runs[label])
    benchmark(config)
    report = (tmp_path / "results.md").read_text()
    assert "Over one task, without MountainCarContinuous-v0, where not every critic has a finished run" in report
    assert "seeds are missing" not in report and len(read_rows(tmp_path)) == 3
    train(runs["Pendulum-v1-none-seed1"])
    benchmark(config)
    assert "Critics have unequal numbers of runs here: seeds are missing." in (tmp_path / "results.md").read_text()
    # A critic without any run at all leaves the others' comparison alone.
    benchmark(dataclasses.replace(config, critics=("mlp", "none", "paper")))
    assert "| none | 2 |" in (tmp_path / "results.md").read_text()
    train(runs["MountainCarContinuous-v0-none-seed0"])
    shutil.rmtree(runs["Pendulum-v1-none-seed0"].run_dir)
    shutil.rmtree(runs["Pendulum-v1-none-seed1"].run_dir)
    shutil.rmtree(runs["MountainCarContinuous-v0-mlp-seed0"].run_dir)
    benchmark(config)
    assert "on no task has every critic a finished run" in (tmp_path / "results.md").read_text()


def test_a_run_without_its_evaluations_is_named(tmp_path):
    options = {
        **SMALL,
        "seeds": 2,
        "envs": ("Pendulum-v1",),
        "critics": ("none",),
        "eval_freq": 128,
        "eval_episodes": 1,
    }
    config = BenchmarkConfig(**options, out=str(tmp_path), report_only=True)
    for run in config.runs():
        train(run)
    (tmp_path / "runs" / "Pendulum-v1-none-seed1" / "evaluations.csv").unlink()
    benchmark(config)
    report = (tmp_path / "results.md").read_text()
    assert "1 of 2 runs cannot be read" in report and "evaluations.csv' holds no evaluation, and the run had" in report
    assert [row["seeds"] for row in read_rows(tmp_path)] == ["1"] and "evaluations on held-out goals" in report


def test_a_speed_that_was_never_measured_is_blank(tmp_path, capsys):
    options = {**SMALL, "seeds": 1, "envs": ("Pendulum-v1",), "critics": ("none",), "eval_freq": 0}
    config = BenchmarkConfig(**options, out=str(tmp_path))
    folder = RunFolder(train(config.runs()[0]))
    # Killed after its last checkpoint, before its end was written.
    (folder.path / "run.json").write_text(json.dumps({"status": "running", "timesteps": 0}))
    benchmark(config)
    assert folder.finished and "nan" in capsys.readouterr().out
    assert [row["steps/s"] for row in read_rows(tmp_path)] == [""]
    (folder.path / "run.json").write_text(json.dumps({"status": "running", "timesteps": 0}))
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert "done: 256 steps; " in capsys.readouterr().out


def test_a_folder_with_a_run_s_end_but_no_settings_is_no_run(tmp_path):
    options = {**SMALL, "seeds": 1, "envs": ("Pendulum-v1",), "critics": ("mlp",), "eval_freq": 0}
    config = BenchmarkConfig(**options, out=str(tmp_path), report_only=True)
    RunFolder(str(config.runs()[0].run_dir)).update_status(status="finished")
    with pytest.raises(ValueError, match="no run of these has finished"):
        benchmark(config)
    with pytest.raises(ValueError, match=r"is not empty. Take another, or delete what is there, which is no run"):
        benchmark(dataclasses.replace(config, report_only=False))


def test_a_setting_of_the_critic_that_came_later_had_its_default(tmp_path):
    options = {**SMALL, "seeds": 1, "envs": ("Pendulum-v1",), "critics": ("in-context",), "eval_freq": 0}
    config = BenchmarkConfig(**options, out=str(tmp_path), report_only=True)
    folder = RunFolder(train(config.runs()[0]))
    stored = folder.config
    del stored["critic_options"]["ridge"]
    folder.write_config(stored)
    benchmark(config)
    with pytest.raises(ValueError, match="holds a run with --critic-options"):
        benchmark(dataclasses.replace(config, critic_options=CriticConfig(ridge=0.5)))


def test_several_meta_world_tasks_at_once_in_a_benchmark(tmp_path):
    out = benchmark(
        BenchmarkConfig(
            envs=("reach,drawer-close",), critics=("in-context", "mlp"), seeds=1, n_envs=2, n_steps=512, n_epochs=1,
            total_timesteps=1024, max_episode_steps=100, eval_freq=1024, eval_episodes=1, out=str(tmp_path),
        )
    )  # fmt: skip
    report = (out / "results.md").read_text()
    assert "| reach,drawer-close | drawer-close-v3 | mlp | " in report and "Over one task." in report
    assert all(row["success"] for row in read_rows(out))


def test_settings_of_the_critic_are_those_of_the_in_context_one_and_evaluations_a_sixth_apart():
    config = BenchmarkConfig(critics=tuple(CRITICS), seeds=1, critic_options=CriticConfig(kernel="rbf"))
    runs = {run.critic: run for run in config.runs()}
    assert {name for name, run in runs.items() if run.critic_options.kernel == "rbf"} == {"in-context"}
    assert {run.eval_freq for run in runs.values()} == {10_000}
    assert [run.eval_freq for run in BenchmarkConfig(eval_freq=0, seeds=1).runs()] == [0, 0]


def test_what_is_added_to_the_in_context_critic_is_compared_with_it(tmp_path):
    critics = ("in-context", "in-context+frozen", "none")
    options = {**SMALL, "seeds": 1, "envs": ("Pendulum-v1",), "critics": critics, "out": str(tmp_path), "eval_freq": 0}
    benchmark(BenchmarkConfig(**options))
    assert [row["critic"] for row in read_rows(tmp_path)] == list(critics)
    folder = RunFolder(tmp_path / "runs" / "Pendulum-v1-in-context+frozen-seed0")
    assert folder.config["critic"] == "in-context" and folder.config["cross_fit"] is False
    assert "in-context+frozen" in (tmp_path / "results.md").read_text()
    # A run from before these settings had their defaults.
    config = {name: value for name, value in folder.config.items() if name != "prior"}
    folder.write_config(config)
    benchmark(BenchmarkConfig(**options, report_only=True))


def test_each_environment_of_a_benchmark_has_its_own_prior():
    critics = ("in-context+prior", "mlp", "in-context+frozen+prior")
    options = {"critics": critics, "seeds": 1, "critic_options": CriticConfig(kernel="rbf")}
    runs = BenchmarkConfig(**options, envs=("reach,push", "Pendulum-v1"), prior=("a-v0,b-v0", "c-v0")).runs()
    assert [(run.variant, run.prior, run.cross_fit) for run in runs] == [
        ("in-context+prior", ("a-v0", "b-v0"), True), ("mlp", (), True),
        ("in-context+frozen+prior", ("a-v0", "b-v0"), False),
        ("in-context+prior", ("c-v0",), True), ("mlp", (), True), ("in-context+frozen+prior", ("c-v0",), False),
    ]  # fmt: skip
    assert [run.critic_options.kernel for run in runs[:3]] == ["rbf", None, "rbf"]
    for wrong in ({"critics": ("mlp",), "prior": ("c-v0",)}, {"critics": critics}):
        with pytest.raises(ValueError, match="--prior takes one data set for each of --envs"):
            benchmark(BenchmarkConfig(**wrong))


@pytest.mark.parametrize("wrong", [{"critics": ("mlp", "mlp")}, {"envs": ()}])
def test_names_are_given_once(wrong, tmp_path):
    with pytest.raises(ValueError, match="needs at least one name, and each once"):
        benchmark(BenchmarkConfig(**wrong, out=str(tmp_path)))


def test_an_interval_stands_behind_its_number_where_there_is_one():
    assert with_interval(1.25, 1.0, 1.5, 2) == "1.25 [1.00, 1.50]"
    assert with_interval(1.25, math.nan, math.nan, 3) == "1.250" and with_interval(math.nan, 0.0, 1.0, 1) == ""

"""Timings for developers, by pytest-benchmark: what a change makes of conditioning, of values and of recording.

python -m pytest benchmarks/bench_core.py --benchmark-only --benchmark-autosave
python -m pytest benchmarks/bench_core.py --benchmark-only --benchmark-compare
"""

import math

import numpy as np
import pytest
import torch
from icrl_gym.wrappers import RollingContext

from icrl_gym import InContextCritic, InContextTransformer
from icrl_gym.kernels import LaplacianKernel, RBFKernel
from icrl_gym.landmarks import landmark_rows
from icrl_gym.speed_benchmark.problems import random_context, random_states
from icrl_gym.speed_benchmark.wrapper import Trivial

D = 39


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kernel", [RBFKernel(float(D)), LaplacianKernel(math.sqrt(D))], ids=["rbf", "laplacian"])
def test_values_of_2048_states(benchmark, kernel):
    value = InContextTransformer(kernel, n_layers=20).condition(random_context(512, D))
    assert benchmark(value, random_states(2048, D)).shape == (2048,)


@pytest.mark.parametrize("algorithm", ["td", "td_lambda", "residual_gradient"])
def test_conditioning_on_1024_transitions(benchmark, algorithm):
    transformer = InContextTransformer(RBFKernel(float(D)), n_layers=20, algorithm=algorithm)
    assert benchmark(transformer.condition, random_context(1024, D)).coefficients.isfinite().all()


def test_the_critic_s_default_on_a_window_of_16384(benchmark):
    critic = InContextCritic(D, gamma=0.9)
    evaluation = benchmark.pedantic(critic.evaluate, (random_context(16_384, D),), rounds=5, warmup_rounds=1)
    assert evaluation.value.coefficients.isfinite().all()


def test_landmarks_of_16384_states(benchmark):
    assert len(benchmark(landmark_rows, random_states(16_384, D), 256)) == 256


def test_a_recorded_step(benchmark):
    env = RollingContext(Trivial(D), length=4096)
    env.reset()
    observation, *_ = benchmark(env.step, 0)
    assert np.shape(observation) == (D,)

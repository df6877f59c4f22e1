"""Fast paths against slow twins: blocks of distances, matrices without copies, traces over blocks, rolling contexts; the benchmark."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icrl_gym import Context, InContextTransformer
from icrl_gym.algorithms import Algorithm, discounted_sums, goes_on
from icrl_gym.cli import main
from icrl_gym.distances import map_distances
from icrl_gym.fixed_points import fixed_point
from icrl_gym.kernels import (
    ExponentialKernel,
    LaplacianKernel,
    LinearKernel,
    MaternKernel,
    NystromKernel,
    RBFKernel,
    ReLUKernel,
    SoftmaxKernel,
    make_kernel,
)
from icrl_gym.landmark_fixed_points import blocks
from icrl_gym.rolling import RollingConditioner, SlidingMatrix
from icrl_gym.speed_benchmark import SpeedBenchmarkConfig, speed_benchmark
from icrl_gym.speed_benchmark.iteration import PartTimer
from icrl_gym.speed_benchmark.measured import Goal, Measured
from icrl_gym.speed_benchmark.problems import random_context, random_states
from icrl_gym.speed_benchmark.scaling import exponent
from icrl_gym.speed_benchmark.timing import Spread, ratio_of, side_by_side
from icrl_gym.speed_benchmark.values import linear_attention_loop
from icrl_gym.value_function import temporal_difference, transition_matrix

RADIAL = [RBFKernel(20.0), LaplacianKernel(4.0), MaternKernel(6.0)]
# By type: of a sum of a few hundred values of order one.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def numpy_values(kernel, keys, queries):
    """k from differences in extended precision; (n, m)."""
    difference = keys.numpy().astype(np.longdouble)[:, None] - queries.numpy().astype(np.longdouble)
    distance, scale = np.sqrt((difference**2).sum(-1)), np.longdouble(float(kernel.temperature))
    if isinstance(kernel, RBFKernel):
        return np.exp(-(distance**2) / (2 * scale))
    if isinstance(kernel, LaplacianKernel):
        return np.exp(-distance / scale)
    x = math.sqrt(3) * distance / scale
    return (1 + x) * np.exp(-x)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_values_by_blocks_are_sums_by_differences_far_from_the_origin_too(kernel, shift, dtype):
    n, m, d = 150, 700, 8
    keys, queries = random_states(n, d).to(dtype) + shift, random_states(m, d, seed=3).to(dtype) + shift
    queries[:40] = keys[:40]  # no distance at all
    queries[40:80] = keys[40:80] + 1e-3
    weights = random_states(n, 1, seed=4).squeeze(-1).to(dtype)
    truth = numpy_values(kernel, keys, queries)
    np.testing.assert_allclose(
        kernel(keys, queries), truth.astype(float), rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-7
    )
    expected = (weights.numpy().astype(np.longdouble) @ truth).astype(float)
    np.testing.assert_allclose(kernel.expand(keys, weights, queries), expected, rtol=0, atol=TOLERANCE[dtype])


def test_the_smooth_kernel_is_exact_where_states_are_many_scales_from_each_other():
    keys = torch.cat([random_states(200, 6), 1e5 + random_states(200, 6)])
    truth = numpy_values(RBFKernel(2.0), keys, keys).astype(float)
    np.testing.assert_allclose(RBFKernel(2.0)(keys, keys), truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "kernel",
    [*RADIAL, LinearKernel(), LinearKernel(per_feature=True), ReLUKernel(), ExponentialKernel(9.0), SoftmaxKernel(9.0),
     make_kernel("laplacian+linear", 3.0), 0.5 * RBFKernel(9.0) + LinearKernel()],
    ids=repr,
)  # fmt: skip
def test_expand_is_the_sum_of_kernel_values_for_batches_too(kernel, masked):
    keys = torch.stack([random_states(90, 5, seed=s) for s in range(3)])
    queries = torch.stack([random_states(400, 5, seed=s) for s in range(3, 6)])
    mask = torch.ones(3, 90, dtype=torch.bool)
    mask[1, 50:] = not masked
    weights = torch.stack([random_states(90, 1, seed=s).squeeze(-1) for s in range(6, 9)]) * mask
    expected = (weights.unsqueeze(-2) @ kernel(keys, queries, mask)).squeeze(-2)
    torch.testing.assert_close(
        kernel.expand(keys, weights, queries, mask if masked else None), expected, rtol=1e-11, atol=1e-11
    )


def test_a_function_of_distances_may_overwrite_its_block_or_not():
    keys, queries = random_states(300, 5), random_states(250, 5, seed=2)
    expected = torch.cdist(keys, queries, compute_mode="donot_use_mm_for_euclid_dist").square()
    torch.testing.assert_close(map_distances(keys, queries, lambda squared, _: squared.mul_(2.0)), 2 * expected)
    torch.testing.assert_close(map_distances(keys, queries, lambda squared, _: 2 * squared), 2 * expected)


# The matrix of a context


def test_a_product_with_the_matrix_is_that_of_both_kernel_matrices():
    context, kernel = random_context(64, 3, episode=10), LaplacianKernel(2.0)
    discount = 0.9 * (~context.terminated).double()
    matrix = transition_matrix(kernel, context.states, context, None, discount)
    assert len(matrix.breaks) == 7  # six ends of episodes and the last transition
    dense = (kernel(context.states, context.states) - discount * kernel(context.states, context.next_states)).T
    c = random_states(64, 1).squeeze(-1)
    torch.testing.assert_close(matrix.times(c), dense @ c)
    torch.testing.assert_close(matrix.difference().T, dense)
    torch.testing.assert_close(temporal_difference(kernel, context.states, context, None, discount)[1].T, dense)


# Traces from block to block


@settings(deadline=None, max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 30), st.floats(0.0, 1.0))
def test_sums_along_a_trajectory_are_carried_over_the_border_of_blocks(follows, size, decay):
    follows = torch.tensor(follows)
    follows[-1] = False
    values = random_states(2, len(follows))
    whole = discounted_sums(values, follows, decay)
    after, parts = torch.zeros(2).double(), []
    for rows in reversed(blocks(len(follows), size)):
        parts.insert(0, discounted_sums(values[:, rows], follows[rows], decay, after))
        after = parts[0][:, 0]
    torch.testing.assert_close(torch.cat(parts, -1), whole)
    expected, run = np.zeros_like(values.numpy()), np.zeros(2)
    for index in range(len(follows) - 1, -1, -1):
        run = values[:, index].numpy() + decay * float(follows[index]) * run
        expected[:, index] = run
    np.testing.assert_allclose(whole, expected, atol=1e-12)


@pytest.mark.parametrize("n", [65, 128, 200, 321])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("after", [None, "one", "each"])
def test_sums_of_many_rows_are_those_of_each(n, batch, after):
    rng = torch.Generator().manual_seed(n)
    values = random_states(math.prod(batch) * 70, n).reshape(*batch, 70, n)
    follows = torch.rand(*batch, 1, n, generator=rng) < 0.97
    given = {
        None: None,
        "one": torch.tensor(2.0).double(),
        "each": random_states(70, 1).squeeze(-1).expand(*batch, 70),
    }[after]
    expected = torch.zeros_like(values)
    run = torch.zeros(()).double() if given is None else given
    for i in range(n - 1, -1, -1):
        run = values[..., i] + 0.9 * follows[..., i].double() * run
        expected[..., i] = run
    torch.testing.assert_close(discounted_sums(values, follows, 0.9, given), expected)


@pytest.mark.parametrize("episode", [7, 1000])
def test_a_fixed_point_with_traces_through_landmarks_does_not_depend_on_its_blocks(monkeypatch, episode):
    context = random_context(300, 4, episode=episode)
    kernel = NystromKernel(LaplacianKernel(3.0), context.states[::10])
    algorithm, gamma = Algorithm("td_lambda", 0.8), torch.tensor(0.95).double()
    arguments = (kernel, context, algorithm, context.rewards, torch.zeros(()).double(), gamma, 1e-3, True)
    whole = fixed_point(*arguments)
    monkeypatch.setattr("icrl_gym.landmark_fixed_points.blocks", lambda n: blocks(n, 64))
    parts = fixed_point(*arguments)
    torch.testing.assert_close(parts.coefficients, whole.coefficients, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parts.td_errors, whole.td_errors, rtol=1e-9, atol=1e-12)
    assert int(goes_on(context).sum()) > 200  # borders of blocks lie within trajectories


# Batches in groups


@pytest.mark.parametrize("temperature", [3.0, "median"])
@pytest.mark.parametrize("options", [{"n_layers": 15}, {"n_layers": math.inf, "algorithm": "td_lambda"}])
def test_groups_of_a_batch_are_the_batch(monkeypatch, options, temperature):
    contexts = [random_context(n, 3, seed=n, episode=9) for n in (20, 31, 40, 40, 12)]
    transformer = InContextTransformer(
        LaplacianKernel(temperature) + LinearKernel(per_feature=True), value_shift=True, **options
    )
    batch = Context.stack(contexts)
    together, alone = transformer.condition(batch), transformer.condition(contexts[1])
    groups = [slice(0, 2), slice(2, 4), slice(4, 6)]
    monkeypatch.setattr("icrl_gym.transformer._groups", lambda context, kernel: groups)
    value = transformer.condition(batch)
    for name in ("coefficients", "center_mask", "shift", "offset", "td_errors", "centers"):
        torch.testing.assert_close(getattr(value, name), getattr(together, name), msg=name)
    queries = random_states(6, 3)
    torch.testing.assert_close(value(queries), together(queries))
    torch.testing.assert_close(value(queries)[1], alone(queries))


def test_a_context_that_diverges_is_named_by_its_place_in_the_batch(monkeypatch):
    context = Context([[1.0]], [1.0], [[2.0]], [False])
    calm = Context([[1.0]], [1.0], [[0.5]], [False])
    transformer = InContextTransformer(LinearKernel(), [0.9] * 60, gamma=0.99)
    monkeypatch.setattr("icrl_gym.transformer._groups", lambda context, kernel: [slice(0, 1), slice(1, 2), slice(2, 3)])
    with pytest.raises(FloatingPointError, match="context 2 of 3"):
        transformer.condition(Context.stack([calm, calm, context]))


# Rolling contexts

DEPTHS = {
    "layers": {"n_layers": 15},
    "layers with traces": {"n_layers": 5, "algorithm": "td_lambda", "trace_decay": 0.7},
    "conjugate": {"n_layers": 5, "algorithm": "monte_carlo", "acceleration": "conjugate"},
    "average reward": {"n_layers": 5, "algorithm": "average_reward"},
    "fixed point": {"n_layers": math.inf, "value_shift": True},
    "fixed point with traces": {"n_layers": math.inf, "algorithm": "td_lambda", "trace_decay": 0.8, "value_shift": True},
    "ridge regression": {"n_layers": math.inf, "algorithm": "monte_carlo", "offset": "removed"},
}  # fmt: skip


def assert_like_afresh(rolling, transformer, tolerance=1e-8):
    ours, twin = rolling.condition(), transformer.condition(rolling.context)
    queries = random_states(20, rolling.context.n_features)
    torch.testing.assert_close(ours(queries), twin(queries), rtol=tolerance, atol=tolerance)
    for name in ("coefficients", "td_errors", "offset", "shift"):
        torch.testing.assert_close(getattr(ours, name), getattr(twin, name), rtol=tolerance, atol=tolerance, msg=name)


# What a kernel that is not symmetric changes are the new columns, and they are the same to every depth.
@pytest.mark.parametrize(
    ("depth", "kernel"),
    [*((depth, LaplacianKernel(3.0)) for depth in DEPTHS), ("layers", ReLUKernel()), ("fixed point with traces", ReLUKernel())],
    ids=repr,
)  # fmt: skip
def test_a_rolling_context_is_conditioned_as_afresh(depth, kernel):
    options = DEPTHS[depth]
    ridge = {"ridge": 1e-2} if options["n_layers"] == math.inf else {}
    transformer = InContextTransformer(kernel, gamma=0.9, **options, **ridge)
    stream, place = random_context(400, 4, episode=13), 0
    rolling = RollingConditioner(transformer, 40, 4)
    # Filling up, rolling on, all at once, too many at once, nearly all.
    for size in (1, 7, 30, 5, 5, 5, 11, 40, 60, 5, 1, 39, 5):
        rolling.extend(stream[place : place + size])
        place += size
        assert rolling.context == stream[max(0, place - 40) : place]
        assert_like_afresh(rolling, transformer)


# Only the inverse is made from itself again and again; what layers use is moved and never changed, so that they need fewer updates.
@pytest.mark.parametrize(("depth", "updates"), [("fixed point with traces", 1000), ("layers", 100)])
def test_nothing_piles_up_over_a_thousand_updates(depth, updates):
    shift = 1000.0
    transformer = InContextTransformer(LaplacianKernel(2.5), gamma=0.99, **DEPTHS[depth])
    stream = random_context(48 + 3 * updates, 4, episode=50)
    stream = Context(
        stream.states + shift, stream.rewards, stream.next_states + shift, stream.terminated, stream.truncated
    )
    rolling = RollingConditioner(transformer, 48, 4)
    rolling.extend(stream[:48])
    for start in range(48, len(stream), 3):
        rolling.extend(stream[start : start + 3])
        if start % 300 == 0:
            rolling.condition()
    value = rolling.condition()
    twin = transformer.condition(stream[-48:])
    queries = random_states(30, 4) + shift
    torch.testing.assert_close(value(queries), twin(queries), rtol=0, atol=1e-8)


def test_an_inverse_that_has_become_worthless_is_computed_anew():
    transformer = InContextTransformer(LaplacianKernel(2.5), n_layers=math.inf)
    rolling = RollingConditioner(transformer, 30, 3)
    rolling.extend(random_context(40, 3))
    rolling.condition()
    rolling._inverse.window.normal_(generator=torch.Generator().manual_seed(0))
    rolling.extend(random_context(4, 3, seed=1))
    assert_like_afresh(rolling, transformer)


def test_a_rolling_context_without_a_fixed_point_says_what_conditioning_afresh_says():
    transformer = InContextTransformer(LaplacianKernel(1.0), n_layers=math.inf, ridge=0.0)
    rolling = RollingConditioner(transformer, 10, 1)
    rolling.extend(Context([[1.0]] * 4, [0.0, 1.0, 2.0, 3.0], [[2.0]] * 4, [True] * 4))  # one state, four values
    with pytest.raises(FloatingPointError, match="not unique with ridge=0"):
        rolling.condition()


def test_an_empty_rolling_context_has_the_value_zero():
    for n_layers in (3, math.inf):
        rolling = RollingConditioner(InContextTransformer(RBFKernel(1.0), n_layers=n_layers), 5, 2)
        rolling.extend(Context.empty(2))
        assert len(rolling) == 0
        assert rolling.condition()([[1.0, 2.0]]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": RBFKernel("median")}, "two states and nothing else"),
        ({"kernel": SoftmaxKernel(1.0)}, "two states and nothing else"),
        ({"kernel": LinearKernel() + LaplacianKernel("median")}, "two states and nothing else"),
        ({"n_landmarks": 4}, "every transition for a center, got n_landmarks=4"),
        ({"algorithm": "residual_gradient"}, "every algorithm but residual_gradient"),
    ],
)
def test_what_cannot_roll_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RollingConditioner(InContextTransformer(**{"kernel": RBFKernel(1.0), "n_layers": 3, **options}), 10, 2)


def test_a_rolling_context_takes_one_context_of_its_states():
    rolling = RollingConditioner(InContextTransformer(RBFKernel(1.0), n_layers=3), 10, 2)
    with pytest.raises(ValueError, match="one context of states with 2 entries"):
        rolling.extend(random_context(4, 3))
    with pytest.raises(ValueError, match="length must be at least 1"):
        RollingConditioner(InContextTransformer(RBFKernel(1.0), n_layers=3), 0, 2)


def test_a_sliding_matrix_keeps_what_stays():
    sliding, twin = SlidingMatrix(6, torch.float64, torch.device("cpu")), np.zeros((0, 0))
    for step, (drop, add) in enumerate([(0, 2), (0, 4), (2, 2), (1, 1), (3, 3), (6, 6), (1, 1)]):
        window = sliding.roll(drop, add)
        twin = np.pad(twin[drop:, drop:], (0, add), constant_values=step)
        window[len(window) - add :], window[:, len(window) - add :] = step, step
        np.testing.assert_array_equal(window, twin)


# The benchmark


def test_the_loop_over_queries_is_the_linear_transformer():
    context, queries = random_context(30, 3, episode=8), random_states(5, 3)
    transformer = InContextTransformer(LinearKernel(), [0.5] * 7, step_normalization="length", gamma=0.9)
    expected = transformer.read_out(transformer(transformer.embed(context, queries)))
    torch.testing.assert_close(linear_attention_loop(context, queries, 0.5, 7, 0.9), expected)


def test_rounds_alternate_and_ratios_are_taken_round_by_round():
    turns = []
    taken = side_by_side({name: lambda name=name: turns.append(name) for name in "ab"}, 3, least_seconds=0.0)
    assert "".join(turns)[-6:] == "baabba"
    assert [len(seconds) for seconds in taken.values()] == [3, 3]
    assert ratio_of([2.0, 8.0, 6.0], [1.0, 2.0, 2.0]) == Spread(3.0, 2.5, 3.5)
    with pytest.raises(ValueError, match="at least one round"):
        side_by_side({}, 0)


def test_the_exponent_is_that_of_the_large_sizes():
    assert exponent([1.0, 10.0, 100.0], [7.0, 1e3, 1e6]) == pytest.approx(3.0)


def test_goals_are_met_or_not():
    spread = Spread(1.2, 1.0, 1.4)
    assert Measured("r", "w", "a", spread, goal=Goal("at most", 1.3)).verdict == "yes"
    assert Measured("r", "w", "a", spread, goal=Goal("at least", 1.3)).verdict == "no"
    assert Measured("r", "w", "a", Spread(math.nan, math.nan, math.nan), goal=Goal("at least", 1.3)).verdict == ""


def test_a_part_s_time_is_without_that_of_the_parts_it_calls(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.thread_time", lambda: now[0])

    class Work:
        def inner(self):
            now[0] += 1.0

        def outer(self):
            now[0] += 2.0
            self.inner()
            self.inner()
            now[0] += 4.0

    timer, original = PartTimer(), Work.outer
    with timer.watching({"in": [(Work, "inner")], "out": [(Work, "outer")]}, "rest"):
        Work().outer()
        Work().inner()
        now[0] += 8.0
    assert timer.seconds == {"in": 3.0, "out": 6.0, "rest": 8.0}
    assert Work.outer is original


def test_the_command_writes_table_json_and_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("icrl_gym.speed_benchmark.timing._repeats", lambda call, least_seconds: 1)
    rows = [
        "literal",
        "query-loop",
        "evaluation",
        "conditioning",
        "rolling",
        "iteration",
        "wrapper",
        "batch",
        "peers",
        "value-network",
        "scaling",
    ]
    threads = torch.get_num_threads()
    assert (
        main(["benchmark", "speed", "--quick", "--n-features", "5", "--out", str(tmp_path / "out"), "--rows", *rows])
        == 0
    )
    assert torch.get_num_threads() == threads
    table = (tmp_path / "out" / "speed.md").read_text()
    assert table in capsys.readouterr().out
    data = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert {row["row"] for row in data["rows"]} == set(rows) - {"scaling"}
    assert {curve["variable"] for curve in data["scaling"]} == {"n", "L", "d"}
    assert (tmp_path / "out" / "speed.png").stat().st_size > 0
    for row in data["rows"]:
        assert row["goal"] is None  # of the full sizes only
        # GPyTorch adds a jitter of its own.
        exact = 1e-4 if row["row"] == "peers" else 1e-9
        assert all(size < (exact if name == "float64" else 1e-4) for name, size in row["differences"].items()), row[
            "what"
        ]
        assert f"| {row['row']} |" in table


def test_settings_that_cannot_work_are_said(tmp_path):
    with pytest.raises(ValueError, match="--rounds must be at least 1, got 0"):
        speed_benchmark(SpeedBenchmarkConfig(rounds=0, out=str(tmp_path)))
    with pytest.raises(ValueError, match="each once; got wrapper wrapper"):
        speed_benchmark(SpeedBenchmarkConfig(rows=("wrapper", "wrapper"), out=str(tmp_path)))

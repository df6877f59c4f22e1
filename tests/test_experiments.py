"""`icrl-gym reproduce`: what it leaves, that it goes on where it stopped, and that the table does not depend on processes."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from icrl_gym import InContextTransformer
from icrl_gym.cli import main
from icrl_gym.datasets import NOISE_LEVELS, Transitions, contexts, dataset_id, load_transitions
from icrl_gym.experiments import BEYOND, EXPERIMENTS, Report, ReproduceConfig, transfer, write_page
from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.offset import offset_cell
from icrl_gym.experiments.report import interval
from icrl_gym.experiments.synthetic import synthetic_cell
from icrl_gym.kernels import RBFKernel
from icrl_gym.metaworld import PAPER_DOMAINS
from icrl_gym.plots import new_figure, save_figure
from icrl_gym.td_loss import td_loss_by_depth


def table(folder, name="table.csv"):
    with (folder / name).open() as stream:
        return list(csv.DictReader(stream))


def test_an_experiment_leaves_table_figure_events_and_verdict(tmp_path, capsys):
    assert main(["reproduce", "offset", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "offset"
    for name in ("config.json", "table.csv", "table.md", "offset.png", "offset.pdf", "verdict.md"):
        assert (folder / name).stat().st_size > 50, name
    assert list((folder / "tensorboard").iterdir())
    assert json.loads((folder / "config.json").read_text())["quick"] is True
    verdict = (folder / "verdict.md").read_text()
    assert verdict.startswith("The paper: ") and "Measured: " in verdict and verdict.endswith("They agree.\n")
    assert verdict.strip() in capsys.readouterr().out
    for row in table(folder):
        assert float(row["largest deviation from it"]) < 1e-10 < 1e-3 < float(row["|offset|"])
        assert float(row["advantages, centered exactly"]) < 1e-10 < 1e-2 < float(row["advantages, mean subtracted"])


def test_the_table_is_the_same_in_one_process_and_in_two_and_when_it_goes_on(tmp_path, capsys):
    run = ["reproduce", "synthetic", "--quick"]
    assert main([*run, "--jobs", "1", "--out", str(tmp_path / "one")]) == 0
    assert main([*run, "--jobs", "2", "--out", str(tmp_path / "two")]) == 0
    assert table(tmp_path / "one" / "synthetic") == table(tmp_path / "two" / "synthetic")
    cells = sorted((tmp_path / "two" / "cells").iterdir())
    for cell in cells[::2]:
        cell.unlink()
    capsys.readouterr()
    assert main([*run, "--jobs", "1", "--out", str(tmp_path / "two")]) == 0
    assert "known" in capsys.readouterr().out
    assert table(tmp_path / "one" / "synthetic") == table(tmp_path / "two" / "synthetic")


def test_a_page_of_everything_that_is_finished(tmp_path):
    run = [
        "reproduce",
        "offset",
        "--quick",
        "--jobs",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--docs",
        str(tmp_path / "docs"),
    ]
    assert main([*run, "--semi-gradient"]) == 0  # which changes nothing here but the folder
    assert main(run) == 0
    file = tmp_path / "docs" / "results.md"
    page = file.read_text()
    assert page.index("\n## offset\n") < page.index("\n## offset-semi-gradient\n")
    assert "icrl-gym reproduce offset --semi-gradient" in page and page.count("The paper: ") == 2
    targets = re.findall(r"\]\((results/[^)]+)\)", page)
    assert len(targets) == 4 and all((tmp_path / "docs" / target).is_file() for target in targets)
    # What is written by hand around the marks stays, and writing it again changes nothing.
    file.write_text(page.replace("# Results", "# Mine\n\nBefore.") + "After.\n")
    mine = file.read_text()
    assert write_page(tmp_path / "out", tmp_path / "docs") == file and file.read_text() == mine
    for text in ("Only mine.\n", "Half <!-- reproduced: begin --> a page.\n"):
        file.write_text(text)
        write_page(tmp_path / "out", tmp_path / "docs")
        assert file.read_text().startswith(text) and "\n## offset\n" in file.read_text()


def test_all_writes_the_page_into_docs_and_a_quick_one_beside_its_numbers():
    assert ReproduceConfig("all").page == Path("docs") and ReproduceConfig("noise").page is None
    assert ReproduceConfig("all", quick=True, out="there").page == Path("there")
    assert ReproduceConfig("noise", docs="mine").page == ReproduceConfig("all", docs="mine").page == Path("mine")


def test_a_long_table_is_shown_by_its_summary(tmp_path):
    rows = [{"x": x, "|x|": abs(x)} for x in range(-50, 50)]
    report = Report("cross-domain", "a.", "b.", True, rows, summary=[{"sum": 50.0}])
    report.write(tmp_path / "out" / "cross-domain", {"semi_gradient": False, "seeds": 1})
    page = write_page(tmp_path / "out", tmp_path / "docs").read_text()
    assert "| sum |\n| --- |\n| 50 |\n" in page and "| x |" not in page
    assert len(table(tmp_path / "docs" / "results", "cross-domain.csv")) == 100


def counted(x, log):
    with open(log, "a") as stream:
        stream.write(f"{x} ")
    if x == 13:
        raise RuntimeError("unlucky")
    return {"square": x * x}


def test_a_grid_computes_each_cell_once_and_keeps_what_is_done(tmp_path):
    log = tmp_path / "log"
    cells = [{"x": x, "log": str(log)} for x in (2, 3, 2, 13)]
    with pytest.raises(RuntimeError, match="unlucky"):
        run_grid(counted, cells, tmp_path / "cells", 1, "test")
    assert log.read_text().split() == ["2", "3", "13"]
    damaged = sorted((tmp_path / "cells").iterdir())[0]
    square = json.loads(damaged.read_text())["cell"]["x"]
    damaged.write_text(damaged.read_text()[:-9])
    results = run_grid(counted, cells[:3], tmp_path / "cells", 1, "test")
    assert [r["square"] for r in results] == [4, 9, 4] and log.read_text().split() == ["2", "3", "13", str(square)]
    log.write_text("2 3 13 ")
    results = run_grid(counted, [*cells[:3], {"x": 4, "log": str(log)}], tmp_path / "cells", 1, "test")
    assert [r["square"] for r in results] == [4, 9, 4, 16]
    assert log.read_text().split() == ["2", "3", "13", "4"]


def test_more_transitions_layers_and_the_true_kernel_recover_more_of_the_shape():
    cell = {"n_features": 1, "n": 128, "n_layers": 100, "temperature": 0.1}
    errors = [np.mean([synthetic_cell(**{**cell, **change}, seed=s)["shape"] for s in range(4)])
              for change in ({}, {"n": 8}, {"n_layers": 1}, {"temperature": 10.0})]  # fmt: skip
    assert errors[0] < 0.1 and all(error > 2 * errors[0] for error in errors[1:])


@pytest.mark.parametrize("ends", ["none", "time limits", "terminations"])
def test_the_offset_is_constant_and_centering_removes_it(ends):
    cell = offset_cell("laplacian", ends, 20, seed=3)
    assert cell["measured"] == pytest.approx(cell["predicted"], rel=1e-9)
    assert cell["spread"] < 1e-10 and cell["centered"] < 1e-10 and cell["mean"] > 1e-3


def test_intervals():
    assert interval([3.0, 3.0]) == (3.0, 3.0, 3.0)
    mean, low, high = interval([1.0, 2.0, 3.0, float("nan")])
    assert mean == 2.0 and 1.0 <= low < 2.0 < high <= 3.0
    assert interval([1.0, float("inf")])[0] == float("inf")
    assert np.isnan(interval([float("nan")])[0])


def test_a_verdict_says_whether_it_agrees():
    report = Report("x", "water is wet.", "it is dry.", False, [{"a": 1.0, "b": "c"}, {"a": float("nan"), "b": "d"}])
    assert report.verdict == "The paper: water is wet. Measured: it is dry. They differ."
    beyond = Report("x", "Nobody asked.", "it is dry.", None, report.rows)
    assert beyond.verdict == "Nobody asked. Measured: it is dry."
    assert report.markdown() == "| a | b |\n| --- | --- |\n| 1 | c |\n|  | d |\n"


@pytest.fixture(scope="module")
def meta_world(tmp_path_factory):
    """The experiments on Meta-World's data at their quick size."""
    out = tmp_path_factory.mktemp("meta_world")
    for name in ("noise", "cross-domain", "temperature", "linear"):
        assert main(["reproduce", name, "--quick", "--jobs", "1", "--out", str(out)]) == 0
    return out


def cells_of(out, name, **wanted):
    """What the grid of an experiment kept: (settings, result) of the cells with these settings."""
    stored = [json.loads(file.read_text()) for file in sorted((out / "cells").glob(f"{name}-*.json"))]
    found = [(c["cell"]["settings"], c["result"]) for c in stored]
    return [(s, r) for s, r in found if all(s[key] == value for key, value in wanted.items())]


def numbers(row, *names):
    return [float(row[name]) for name in names]


def test_the_experiments_on_meta_world_leave_tables_that_agree(meta_world):
    for name in ("noise", "cross-domain", "temperature", "linear"):
        assert (meta_world / name / "verdict.md").is_file() and list((meta_world / name).glob("*.png"))
    rows = table(meta_world / "cross-domain")
    assert len(rows) == 2 * 5 * 5 * 3 and all(numbers(row, "held-out")[0] != 1.0 for row in rows)
    noise = {(r["domain"], r["noise"], r["normalization"]): r["held-out"] for r in table(meta_world / "noise")}
    for row in rows:  # the same cells
        if row["trained on"] == row["tested on"] and row["trained on"] != "button-press-v3":
            assert noise[row["trained on"], row["noise"], row["normalization"]] == row["held-out"]


def test_same_seed_same_table_in_one_process_and_two_on_meta_world(meta_world, tmp_path):
    run = ["reproduce", "linear", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    assert main([*run, "--root", str(meta_world / "datasets")]) == 0
    assert table(tmp_path / "linear") == table(meta_world / "linear")
    assert (tmp_path / "linear" / "verdict.md").read_text() == (meta_world / "linear" / "verdict.md").read_text()


def test_a_cell_of_cross_domain_is_what_its_weights_do_on_the_goals_held_out(meta_world):
    train, test, level = "plate-slide-v3", "pick-place-wall-v3", "medium"
    where = {"trained on": train, "tested on": test, "noise": level, "normalization": "row_sum"}
    (row,) = [r for r in table(meta_world / "cross-domain") if {k: r[k] for k in where} == where]
    inside, outside, shares = [], [], []
    for seed in (0, 1):
        (settings, result), = cells_of(
            meta_world, "transfer_cell", domain=train, step_normalization="row_sum", seed=seed
        )  # fmt: skip
        weights = InContextTransformer(RBFKernel(result["temperature"]), result["step_sizes"], 0.9, "row_sum")
        # By the data set itself: goals 2 and 3 of 4, rewards in tenths.
        data = load_transitions(dataset_id(test, level), episodes=(2, 3), root=meta_world / "datasets")
        scaled = Transitions(
            data.states, 0.1 * data.rewards, data.next_states, data.terminated, data.truncated, data.episode
        )
        batch, queries = contexts(scaled, settings["n_context"], 4, seed, settings["n_queries"])
        losses = td_loss_by_depth(weights, batch, queries)
        stored = result["tests"][f"{test} {level}"]
        np.testing.assert_allclose(stored["in_context"], losses[0].nanmean(0), rtol=1e-9)
        np.testing.assert_allclose(stored["held_out"], losses[1].nanmean(0), rtol=1e-9)
        # And one context, of those with any reward, by the value function alone.
        one = int(queries.rewards.abs().amax(-1).argmax())
        value, asked = weights.condition(batch[one]), queries[one]
        here, there = value(asked.states).numpy(), value(asked.next_states).numpy()
        errors = asked.rewards.numpy() + 0.9 * there - here
        direct = np.mean(errors**2) / np.mean(asked.rewards.numpy() ** 2)
        assert float(losses[1][one, -1]) == pytest.approx(direct, rel=1e-9)
        inside.append(stored["in_context"][-1])
        outside.append(stored["held_out"][-1])
        seen = losses[1][:, -1][~losses[1][:, -1].isnan()]
        shares.append(float((seen < 1).double().mean()))
        # The largest step times the top eigenvalue, by NumPy.
        points = batch.states.numpy()
        distances = ((points[:, :, None] - points[:, None]) ** 2).sum(-1)
        gram = np.exp(-distances / (2 * result["temperature"]))
        tops = [np.linalg.eigvalsh(g)[-1] * max(result["step_sizes"]) / g.sum(0).max() for g in gram]
        assert stored["top"] == pytest.approx(max(tops), rel=1e-6)
    assert numbers(row, "in-context", "held-out", "contexts below 1") == pytest.approx(
        [np.mean(inside), np.mean(outside), np.mean(shares)], rel=1e-9
    )


def test_intervals_of_the_tables_contain_their_means(meta_world):
    for name, mean in (
        ("noise", "held-out"),
        ("cross-domain", "held-out"),
        ("linear", "held-out"),
        ("temperature", "trained"),
    ):
        for row in table(meta_world / name):
            middle, low, high = numbers(row, mean, "95% low", "95% high")
            # Of two seeds with one that has no reward there is no interval.
            assert np.isnan(low) or low * (1 - 1e-9) <= middle <= high * (1 + 1e-9), row


def test_the_verdicts_count_what_the_tables_hold(meta_world):
    rows = table(meta_world / "cross-domain")
    domains = list(dict.fromkeys(row["trained on"] for row in rows))

    def worst(normalization, train, test):
        where = (normalization, train, test)
        losses = [
            numbers(r, "held-out")[0] for r in rows if (r["normalization"], r["trained on"], r["tested on"]) == where
        ]
        return max(loss for loss in losses if not np.isnan(loss))

    counts = []
    for normalization in ("length", "row_sum"):
        four = [worst(normalization, a, b) < 1 for a in domains[:4] for b in domains[:4]]
        button = [worst(normalization, a, domains[4]) < 1 for a in domains[:4]]
        counts += [sum(four), sum(button)]
    verdict = (meta_world / "cross-domain" / "verdict.md").read_text()
    said = re.search(r"length, (\d+) of the 16 .* and (\d+) of 4 .* row_sum (\d+) of 16 and (\d+) of 4", verdict)
    assert list(map(int, said.groups())) == counts
    matrix = (meta_world / "cross-domain" / "summary.md").read_text()
    assert matrix.count("\n") == 12 and f"{worst('row_sum', domains[0], domains[4]):.4g} |" in matrix

    noise = [r for r in table(meta_world / "noise") if not np.isnan(float(r["held-out"]))]
    verdict = (meta_world / "noise" / "verdict.md").read_text()
    below = {
        n: [numbers(r, "held-out")[0] < 1 for r in noise if r["normalization"] == n] for n in ("length", "row_sum")
    }
    said = re.search(r"in (\d+) of (\d+) cells; with row_sum in (\d+) of (\d+)", verdict)
    assert list(map(int, said.groups())) == [f(below[n]) for n in ("length", "row_sum") for f in (sum, len)]

    verdict = (meta_world / "linear" / "verdict.md").read_text()
    trained = {
        r["kernel"]: numbers(r, "held-out")[0] for r in table(meta_world / "linear") if r["weights"] == "trained"
    }
    assert all(f"{kernel} {loss:.3g}" in verdict for kernel, loss in trained.items())
    assert f"on {int(trained['linear'] >= 1)} of them" in verdict

    verdict = (meta_world / "temperature" / "verdict.md").read_text()
    for row in table(meta_world / "temperature"):
        assert f"{row['domain']} {float(row['trained']):.3g}" in verdict
        found = [r["temperature"] for _, r in cells_of(meta_world, "transfer_cell", domain=row["domain"],
                 step_normalization="row_sum", kernel="rbf", iterations=15) if len(r["tests"]) == 15]  # fmt: skip
        assert float(row["trained"]) == pytest.approx(np.prod(found) ** (1 / len(found)))


def test_what_a_user_gets_wrong(tmp_path, capsys):
    assert main(["reproduce", "offset", "--seeds", "0", "--out", str(tmp_path)]) == 2
    assert "--seeds must be at least 1" in capsys.readouterr().err
    paper = {"noise", "cross-domain", "temperature", "linear", "synthetic", "offset", "boyan"}
    assert set(EXPERIMENTS) - set(BEYOND) == paper and set(BEYOND) < set(EXPERIMENTS)


def test_the_readme_s_command_is_one_that_is_tested():
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    commands = re.findall(r"^icrl-gym reproduce (\S+) --quick$", readme, re.MULTILINE)
    assert commands and set(commands) <= set(EXPERIMENTS)


def test_pairs_without_any_reward_are_left_out_and_said(tmp_path, monkeypatch):
    none = "shelf-place-v3"  # as if no context of its goals had a reward

    def result(train):
        held_out = {d: float("nan") if d == none else 2.0 if d == train else 0.5 for d in PAPER_DOMAINS}
        cell = {"in_context": [1.0, 0.1], "below_one": 1.0, "top": 1.0}
        return {
            "tests": {
                f"{d} {n}": {**cell, "held_out": [1.0, loss]} for d, loss in held_out.items() for n in NOISE_LEVELS
            }
        }

    cells = {(d, n, 0): result(d) for d in PAPER_DOMAINS for n in ("length", "row_sum")}
    monkeypatch.setattr(transfer, "_collect", lambda *_: None)
    monkeypatch.setattr(transfer, "_transfer_cells", lambda *_: cells)
    report = transfer.cross_domain(ReproduceConfig("cross-domain", seeds=1, out=str(tmp_path)))
    # Of the 16 pairs among the four, 4 are onto it, and of the other 12 the diagonal has 3.
    assert "with length, 9 of the 12 pairs among the four" in report.finding and "4 of 4 onto Button" in report.finding
    assert (
        report.finding.endswith("Left out: 4 of 20 pairs, whose contexts have no reward at all.") and not report.agrees
    )
    assert all(np.isnan(row["shelf-place"]) for row in report.summary)
    report.write(tmp_path / "cross-domain", {})  # the figure draws


def test_a_quick_run_beyond_the_paper_has_data_of_its_own(tmp_path):
    roots = {name: ReproduceConfig(name, quick=True, out=str(tmp_path)).root for name in ("noise", *BEYOND)}
    assert roots["noise"] == str(tmp_path / "datasets")
    assert roots["all-domains"] == roots["any-context"] != roots["noise"]


@pytest.mark.parametrize("name", ["synthetic", "offset"])
def test_every_line_of_a_figure_is_in_a_legend_and_every_axis_has_ticks(name, tmp_path):
    report = EXPERIMENTS[name](ReproduceConfig(name, quick=True, jobs=1, out=str(tmp_path)))
    figure = report.figures["errors" if name == "synthetic" else "offset"]
    for axes in figure.axes:
        assert len(axes.get_legend().get_texts()) == len(axes.lines) + (name == "offset") * len(axes.collections)
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2


def test_a_figure_has_the_format_of_its_name_and_no_date(tmp_path):
    for name in ("a.png", "a.pdf"):
        figure = new_figure(2, 1)
        figure.add_subplot().plot([0, 1])
        save_figure(figure, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf
    with pytest.raises(ValueError, match="not supported"):
        save_figure(figure, tmp_path / "a.nothing")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pdf", "a.png"]

"""`icrl-gym reproduce`: what it leaves, that it goes on where it stopped, and that the table does not depend on processes."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from icrl_gym.cli import main
from icrl_gym.experiments import EXPERIMENTS, Report
from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.offset import offset_cell
from icrl_gym.experiments.report import interval
from icrl_gym.experiments.synthetic import synthetic_cell


def table(folder):
    with (folder / "table.csv").open() as stream:
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
    page = (tmp_path / "docs" / "reproduced.md").read_text()
    assert page.index("\n## offset\n") < page.index("\n## offset-semi-gradient\n")
    assert "icrl-gym reproduce offset --semi-gradient" in page and page.count("The paper: ") == 2
    targets = re.findall(r"\]\((results/[^)]+)\)", page)
    assert len(targets) == 4 and all((tmp_path / "docs" / target).is_file() for target in targets)


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
    assert report.markdown() == "| a | b |\n| --- | --- |\n| 1 | c |\n|  | d |\n"


def test_the_experiments_on_meta_world_run(tmp_path, capsys):
    for name in ("noise", "cross-domain", "temperature", "linear"):
        assert main(["reproduce", name, "--quick", "--seeds", "1", "--out", str(tmp_path)]) == 0
        assert (tmp_path / name / "verdict.md").is_file() and list((tmp_path / name).glob("*.png"))
    rows = table(tmp_path / "cross-domain")
    assert len(rows) == 2 * 5 * 5 * 3 and all(float(row["held-out"] or "nan") != 1.0 for row in rows)
    noise = {(r["domain"], r["noise"], r["normalization"]): r["held-out"] for r in table(tmp_path / "noise")}
    for row in rows:  # the same cells
        if row["trained on"] == row["tested on"] and row["trained on"] != "button-press-v3":
            assert noise[row["trained on"], row["noise"], row["normalization"]] == row["held-out"]


def test_what_a_user_gets_wrong(tmp_path, capsys):
    assert main(["reproduce", "offset", "--seeds", "0", "--out", str(tmp_path)]) == 2
    assert "--seeds must be at least 1" in capsys.readouterr().err
    assert set(EXPERIMENTS) == {"noise", "cross-domain", "temperature", "linear", "synthetic", "offset", "boyan"}


def test_the_readme_s_command_is_one_that_is_tested():
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    commands = re.findall(r"^icrl-gym reproduce (\S+) --quick$", readme, re.MULTILINE)
    assert commands and set(commands) <= set(EXPERIMENTS)

"""Independent computations: where they run changes nothing, and nothing stays behind."""

import csv
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from icrl_gym.cli import main
from icrl_gym.experiments.grid import run_grid
from icrl_gym.parallel import RayExecutor, WorkerDiedError, Workers, completed, in_own_process

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "ray_cluster.py"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture
def environment():
    """A short folder of its own for Ray, whose sockets bear no long names and whose runs share no folder."""
    folder = tempfile.mkdtemp(prefix="ray")
    yield {**os.environ, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    shutil.rmtree(folder, ignore_errors=True)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def rows(folder):
    with (folder / "offset" / "table.csv").open() as stream:
        return list(csv.DictReader(stream))


def power(base, exp):
    return {"power": base**exp}


class Here(Executor):
    """Computes at once, and remembers what it was given."""

    def __init__(self):
        self.held, self.canceled = [], False

    def submit(self, function, *args):
        future = Future()
        self.held.append(future)
        future.set_result(function(*args))
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.canceled = self.canceled or cancel_futures


def test_each_call_ends_once_under_its_key():
    calls = {name: (x, 2) for name, x in zip("abcde", range(5), strict=True)}
    for at_once in (1, 3, None):
        results = {key: future.result() for key, future in completed(pow, calls, Here(), at_once)}
        assert results == {name: x**2 for name, (x, _) in calls.items()}
    assert list(completed(pow, {}, Here(), 2)) == []


def test_an_early_end_submits_no_more_and_cancels():
    executor = Here()
    ended = completed(pow, {x: (x, 2) for x in range(9)}, executor, 2)
    next(ended)
    ended.close()
    assert len(executor.held) == 2 and executor.canceled


def test_a_process_that_dies_takes_nothing_else_with_it():
    # Functions of a module that workers can import without this file.
    calls = {"dies": (os._exit, 3), "raises": (divmod, 1, 0), "returns": (divmod, 7, 2), "other process": (os.getpid,)}
    with ThreadPoolExecutor(2) as pool:
        ended = dict(completed(in_own_process, calls, pool, 2))
    with pytest.raises(WorkerDiedError, match=r"killed, or out of memory; fewer --jobs"):
        ended["dies"].result()
    with pytest.raises(ZeroDivisionError):
        ended["raises"].result()
    assert ended["returns"].result() == (3, 1) and ended["other process"].result() != os.getpid()


def test_a_worker_that_dies_is_one_line_and_exit_code_1(tmp_path, capsys, monkeypatch):
    from concurrent.futures.process import BrokenProcessPool

    import icrl_gym.cli as module

    for error, message in (
        (
            WorkerDiedError("Pendulum-v1-mlp-seed0: gone"),
            "error: Pendulum-v1-mlp-seed0: gone. What has finished is kept",
        ),
        (BrokenProcessPool("a pool's own words"), "error: a worker: its process died: killed, or out of memory"),
    ):

        def reproduce(config, error=error):
            raise error

        monkeypatch.setattr(module, "reproduce", reproduce)
        assert main(["reproduce", "offset", "--out", str(tmp_path)]) == 1
        assert message in capsys.readouterr().err


def test_what_a_user_gets_wrong(tmp_path, capsys, monkeypatch):
    run = ["reproduce", "offset", "--quick", "--out", str(tmp_path)]
    for wrong, message in (
        (["--address", "10.0.0.1:6379"], "add --backend ray"),
        (["--backend", "ray", "--address", "nowhere"], '--address must be "HOST:PORT"'),
        (["--backend", "ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at --address 127.0.0.1:1"),
        (["--backend", "ray", "--address", "auto"], "no Ray cluster to join at --address auto"),
    ):
        if "ray" in wrong and importlib.util.find_spec("ray") is None:
            continue
        assert main([*run, *wrong]) == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "ray", None)
    # Said before any data are recorded, of which this experiment would need fifteen sets.
    run[1] = "noise"
    assert main([*run, "--backend", "ray"]) == 2
    assert not list(tmp_path.iterdir())
    assert 'pip install "icrl-gym[distributed]"' in capsys.readouterr().err
    with pytest.raises(ImportError, match="distributed"):
        RayExecutor()
    with pytest.raises(ValueError, match="--jobs must be at least 1"):
        Workers(0)


def test_ray_is_not_imported_unless_asked_for():
    code = "import sys, icrl_gym.cli; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bar_is_for_a_terminal(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    run_grid(power, [{"base": 2, "exp": 3}], tmp_path / "a", 1, "lines")
    assert "lines: 1 of 1   base=2, exp=3" in capsys.readouterr().out
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run_grid(power, [{"base": 2, "exp": 3}], tmp_path / "b", 1, "bar")
    shown = capsys.readouterr()
    assert "1 of 1" not in shown.out and "1/1" in shown.err


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_workers_of_a_killed_parent_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from icrl_gym.parallel import Workers, completed

        def cell(x, folder):
            Path(folder, f"pid-{os.getpid()}").touch()
            time.sleep(300)

        if __name__ == "__main__":
            with Workers(2).executor(2) as pool:
                list(completed(cell, {x: (x, sys.argv[1]) for x in range(2)}, pool, 2))
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len(found := list(tmp_path.glob("pid-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    pids = [int(file.name.removeprefix("pid-")) for file in found]
    assert len(pids) == 2
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(gone, pids))


@needs_ray
def test_same_seed_same_table_in_one_process_and_on_ray(tmp_path, environment):
    # One process and two: test_experiments.
    run = ["reproduce", "offset", "--quick"]
    assert main([*run, "--jobs", "1", "--out", str(tmp_path / "one")]) == 0
    command = [sys.executable, "-m", "icrl_gym", *run, "--backend", "ray", "--out", str(tmp_path / "ray")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "one") == rows(tmp_path / "ray")


@needs_ray
def test_a_node_dies_and_the_table_is_that_of_one_machine(tmp_path, environment):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--quick"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "killing a node while it computes cell" in done.stdout and "the tables are equal" in done.stdout

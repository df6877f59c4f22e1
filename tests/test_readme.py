"""The README's blocks and the examples, run as a user would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path):
    block = re.sub(r"learn\(10_000", "learn(1_024", block)
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", block], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if "transformer.read_out" in block:
        first, second = (re.search(r"\[(.*?)\]", line).group(1).split(",") for line in done.stdout.splitlines())
        assert [float(x) for x in first] == pytest.approx([0.9, 1.0], abs=1e-3)
        assert float(second[0]) - float(second[1]) == pytest.approx(-0.1, abs=1e-3)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("icrl-gym train") and "--resume" not in c])
def test_commands_are_understood(command, tmp_path):
    arguments = command.split("#")[0].split()[1:]
    small = [
        "--total-timesteps",
        "256",
        "--n-steps",
        "64",
        "--n-epochs",
        "1",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "icrl_gym", *arguments, *small], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.zip").exists()


# Ray's is run where Ray is tested (test_parallel).
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "ray_cluster"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_run_quickly(example, tmp_path):
    done = subprocess.run([sys.executable, str(example), "--quick"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = {
        "plug_into_ppo": "mean return",
        "wrap_metaworld": "correlation of the value",
        "read_td_errors": "in-context rms",
    }
    assert said[example.stem] in done.stdout


def test_every_link_of_the_documents_leads_somewhere():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"

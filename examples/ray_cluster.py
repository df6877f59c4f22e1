"""A grid on a Ray cluster of two nodes, one of which dies half-way: the table is that of one machine.

Both nodes are on this machine, so that anybody can run it (pip install "icrl-gym[distributed]"):

    python examples/ray_cluster.py [--quick]

On a real cluster the same is `icrl-gym reproduce synthetic --backend ray --address HOST:PORT`.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from icrl_gym.experiments.grid import run_grid
from icrl_gym.experiments.synthetic import synthetic_cell
from icrl_gym.parallel import Workers


def cell(seed: int, half: int, signals: str) -> dict:
    """A cell of the experiment `synthetic`; from `half` on, the first that lands on the doomed node dies with it."""
    doomed, caught = Path(signals, "doomed"), Path(signals, "caught")
    if seed >= half and doomed.exists():
        if ray.get_runtime_context().get_node_id() == doomed.read_text():
            caught.write_text(str(seed))
            time.sleep(120)  # the node is killed in the meantime
            raise RuntimeError("the node should have died")
        give_up = time.monotonic() + 60
        while not caught.exists() and time.monotonic() < give_up:
            time.sleep(0.05)  # so that something is left for the other node
    return synthetic_cell(1, 64, 30, 0.1, seed)


def main() -> None:
    """The same grid twice: on processes of this machine, and on two nodes of which one is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 cells instead of 40")
    n = 8 if parser.parse_args().quick else 40

    with tempfile.TemporaryDirectory() as scratch:
        cells = [{"seed": seed, "half": n // 2, "signals": scratch} for seed in range(n)]
        local = run_grid(cell, cells, Path(scratch, "local"), Workers(2), "two processes")

        # Ray asks after its nodes every half second here, so that a dead one is noticed soon.
        noticing = {
            "health_check_period_ms": 500,
            "health_check_initial_delay_ms": 0,
            "health_check_failure_threshold": 4,
        }
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": noticing}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            node = cluster.add_node(num_cpus=1)
            Path(scratch, "doomed").write_text(node.node_id)

            def kill() -> None:
                caught = Path(scratch, "caught")
                while not caught.exists():
                    time.sleep(0.05)
                print(f"killing a node while it computes cell {caught.read_text()}", flush=True)
                cluster.remove_node(node, allow_graceful=False)

            threading.Thread(target=kill, daemon=True).start()
            distributed = run_grid(
                cell, cells, Path(scratch, "ray"), Workers(backend="ray", address=cluster.address), "two nodes"
            )
        finally:
            cluster.shutdown()

    if distributed != local:
        raise SystemExit("the tables differ")
    print("the tables are equal")


if __name__ == "__main__":
    main()

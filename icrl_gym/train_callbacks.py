"""What watches over a run: episodes and checkpoints, Ctrl-C, and how far it is."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, ProgressBarCallback

from icrl_gym.runs import Episode, RunFolder
from icrl_gym.train_settings import TrainConfig

__all__ = ["Interruption", "Lines", "RunCallback", "progress_callback"]


class Interruption:
    """Ctrl-C asks a training to stop after the step it is in; a second one stops it at once.

    An exception in the middle of a step would leave worker processes with answers that nobody has read, so their contexts
    could not be asked for any more.

    Attributes:
        asked: There was a first one.
        forced: There was a second one.
    """

    def __init__(self) -> None:
        self.asked = self.forced = False
        self._before: Any = None

    def __enter__(self) -> Interruption:
        # Only the main thread may set handlers; elsewhere a KeyboardInterrupt comes as it always does.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.forced = True
            raise KeyboardInterrupt
        self.asked = True


class RunCallback(BaseCallback):
    """Episodes into the table, checkpoints on the way."""

    def __init__(self, folder: RunFolder, checkpoint_freq: int, interruption: Interruption) -> None:
        super().__init__()
        self.folder, self.checkpoint_freq, self.interruption = folder, checkpoint_freq, interruption
        self._episodes: list[Episode] = []
        self._next = 0

    def _on_training_start(self) -> None:
        self._next = self.num_timesteps + self.checkpoint_freq

    def _on_rollout_start(self) -> None:
        # Here and not at the rollout's end: the update of the last rollout is in the model now.
        if self.model.num_timesteps >= self._next:
            self._next = self.model.num_timesteps + self.checkpoint_freq
            self.flush()
            self.folder.save_checkpoint(self.model)

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            episode = info.get("episode")
            if episode is not None:
                success = info.get("is_success")
                self._episodes.append(
                    Episode(
                        self.num_timesteps,
                        float(episode["r"]),
                        int(episode["l"]),
                        None if success is None else float(success),
                    )
                )
        return not self.interruption.asked

    def _on_rollout_end(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Write the episodes that have ended."""
        self.folder.append_episodes(self._episodes)
        self._episodes = []


class Lines(BaseCallback):
    """A line now and then, where there is no terminal for a bar."""

    def __init__(self, total_timesteps: int, label: str, n_lines: int = 10) -> None:
        super().__init__()
        self.total, self.label, self.every = total_timesteps, label, max(1, total_timesteps // n_lines)
        self._next = 0
        self._start = (0.0, 0)

    def _on_training_start(self) -> None:
        self._next = self.num_timesteps + self.every
        self._start = (time.perf_counter(), self.num_timesteps)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if self.num_timesteps < self._next:
            return
        self._next += self.every
        speed = (self.num_timesteps - self._start[1]) / (time.perf_counter() - self._start[0])
        recent = [info["r"] for info in self.model.ep_info_buffer or ()]
        average = f"{np.mean(recent):10.1f}" if recent else "    (none)"
        print(
            f"{self.num_timesteps:9,d} of {self.total:,d} steps   mean return {average}   {speed:5.0f} steps/s   {self.label}",
            flush=True,
        )


def progress_callback(config: TrainConfig) -> BaseCallback:
    """A bar on a terminal, with the extra `progress`; lines elsewhere."""
    # The bar goes to stdout. Several runs side by side (`icrl-gym benchmark`) would draw over each other's.
    if sys.stdout.isatty() and multiprocessing.parent_process() is None:
        try:
            return ProgressBarCallback()
        except ImportError:
            print('no progress bar: pip install "icrl-gym[progress]" for one.')
    return Lines(config.total_timesteps, config.label())

"""Independent computations on workers: processes of this machine, or the nodes of a Ray cluster.

A computation is a function of a module and its arguments. It draws its random numbers from its arguments alone, so what
comes out does not depend on where it ran, nor on how often it was begun: what a dying node leaves undone starts again on
another one. Results come back to the process that asked, and that one alone writes files.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Hashable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

__all__ = ["DIED", "Backend", "RayExecutor", "WorkerDiedError", "Workers", "completed", "in_own_process", "spawned"]

Backend = Literal["processes", "ray"]

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

DIED = "its process died: killed, or out of memory; fewer --jobs need less"
_RETRIES = 3  # of a task whose node or process died; an error that the function raises is never tried again
_REACH_SECONDS = 5.0
_REMEDY = "Start one with `ray start --head`, and run this on one of its nodes with --address HOST:PORT, or auto."
_INHERITED = ("MINARI_DATASETS_PATH",)  # what a computation reads from its surroundings beside its arguments


class WorkerDiedError(RuntimeError):
    """A worker process was killed, by the system for its memory or by somebody."""


def in_own_process(function: Callable[..., Result], *args: Any) -> Result:
    """Compute ``function(*args)`` in a process made for it; for the threads of a ``ThreadPoolExecutor``.

    In a pool of processes one that dies takes all others with it. Here it takes its own computation only.

    Args:
        function: Of a module: the process imports it.
        *args: Its arguments.

    Returns:
        Its result, or what it raises.

    Raises:
        WorkerDiedError: The process ended without an answer.
    """
    with ProcessPoolExecutor(1, **spawned()) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool as error:
            raise WorkerDiedError(DIED) from error


def completed(
    function: Callable[..., Result],
    calls: Mapping[Key, tuple[Any, ...]],
    executor: Executor,
    at_once: int | None = None,
) -> Generator[tuple[Key, Future[Result]], None, None]:
    """Compute ``function(*call)`` for each call, and hand out each as it ends.

    Whatever ends the loop over it early, an error or Ctrl-C, cancels what has not begun and shuts the executor down.

    Args:
        function: Of a module: workers import it.
        calls: The arguments of each call, by a key.
        executor: Where to, entered by the caller.
        at_once: Calls that the executor holds at a time. With as many as it has workers, an interruption leaves none
            that would still start. None: all of them, for an executor that has its own queue and may grow.

    Yields:
        (key, future), the future being done: its ``result()`` returns or raises.
    """
    waiting = iter(calls.items())
    running: dict[Future[Result], Key] = {}
    try:
        while True:
            for key, call in islice(waiting, None if at_once is None else at_once - len(running)):
                running[executor.submit(function, *call)] = key
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise


def spawned() -> dict[str, Any]:
    """The settings of a ``ProcessPoolExecutor`` whose workers compute in one thread and end with their parent.

    Returns:
        Keyword arguments: ``ProcessPoolExecutor(jobs, **spawned())``. Scripts that call this need
        ``if __name__ == "__main__":``, because the workers import them.
    """
    # Spawned, not forked: torch and MuJoCo have threads that a fork would not take along.
    return {"mp_context": multiprocessing.get_context("spawn"), "initializer": _start_worker}


def _start_worker() -> None:
    torch.set_num_threads(1)  # the workers are what runs in parallel; more threads than cores slow all of them down
    # Ctrl-C reaches every process of a terminal; a worker has nothing to save and would only print a traceback. One that
    # has (a training run) sets a handler of its own.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in the background, as `nohup ... &` starts it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A worker of a killed process would wait for its next job forever.
        threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@dataclass(frozen=True)
class Workers:
    """Where computations run.

    Attributes:
        jobs: Processes of this machine. On a cluster its free CPUs count instead.
        backend: ``"processes"`` of this machine, or tasks of ``"ray"``, one CPU each.
        address: Of a running Ray cluster, ``"HOST:PORT"``, or ``"auto"`` for the one this machine is a node of. None: a
            Ray of this machine alone, ``jobs`` CPUs large, started for the purpose and stopped afterwards.

    Raises:
        ValueError: Fewer than one job, or an address without Ray.
    """

    jobs: int = 1
    backend: Backend = "processes"
    address: str | None = None

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {self.jobs}.")
        if self.backend not in ("processes", "ray"):
            raise ValueError(f'--backend must be "processes" or "ray", got {self.backend!r}.')
        if self.address is not None and self.backend != "ray":
            raise ValueError(
                f"--address {self.address} is that of a Ray cluster, and --backend is {self.backend}; add --backend ray, "
                "or leave --address out."
            )

    def check(self) -> None:
        """Say early what :meth:`executor` would say: before whoever needs it has worked for it.

        Raises:
            ImportError: Ray is asked for and missing.
            ValueError: No Ray answers at the address.
        """
        if self.backend != "ray":
            return
        ray = _import_ray()
        if ray.is_initialized() or self.address is None:
            return
        if self.address != "auto":
            _reach(self.address)
            return
        _connect(ray, self.address, 1)  # only joining tells whether this machine is a node of a cluster
        ray.shutdown()

    def at_once(self, calls: int) -> int | None:
        """How many of so many calls an executor should hold, for :func:`completed`."""
        return min(self.jobs, calls) if self.backend == "processes" else None

    def executor(self, calls: int) -> Executor:
        """A new executor for so many calls.

        Args:
            calls: No more processes are started than that.

        Raises:
            ImportError: Ray is asked for and missing.
            ValueError: No Ray answers at the address.
        """
        if self.backend == "ray":
            return RayExecutor(self.address, min(self.jobs, calls))
        return ProcessPoolExecutor(min(self.jobs, calls), **spawned())


class RayExecutor(Executor):
    """Tasks on the nodes of a Ray cluster, behind the interface of the standard library's executors.

    Each call is a task of one CPU and computes in one thread. When its node dies it starts again on another, up to three
    times. If this process has a Ray already, that one is used and left as it is.

    Args:
        address: ``"HOST:PORT"`` or ``"auto"``; None starts a Ray of this machine, which ends with the executor.
        jobs: CPUs of the Ray that None starts.

    Raises:
        ImportError: Ray is missing.
        ValueError: No Ray answers at the address.
    """

    def __init__(self, address: str | None = None, jobs: int = 1) -> None:
        self._ray = ray = _import_ray()
        self._mine = not ray.is_initialized()
        self._closed = False
        self._running: dict[Future[Any], Any] = {}
        if self._mine:
            _connect(ray, address, jobs)
        self._task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_on_node)
        self._surroundings = {name: os.environ[name] for name in _INHERITED if name in os.environ}

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call; its arguments and its result travel pickled."""
        if self._closed:
            raise RuntimeError("cannot submit to an executor that was shut down.")
        reference = self._task.remote(os.getcwd(), self._surroundings, function, args, kwargs)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._running[future] = reference
        reference.future().add_done_callback(lambda done: self._hand_over(done, future))
        return future

    def _hand_over(self, done: Future[Any], future: Future[Any]) -> None:
        # Before the result is known to anybody: the reference goes, and with it Ray's copy.
        self._running.pop(future, None)
        error = done.exception()
        if error is None:
            future.set_result(done.result())
            return
        # Ray raises a class made of its own and the function's; a process pool raises the function's.
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException):
            cause.__cause__ = error
            error = cause
        future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for what runs, unless it is to be canceled, then leave Ray; one that was started here ends."""
        if self._closed:
            return
        self._closed = True
        running = dict(self._running)
        if wait and not cancel_futures:
            _wait_for_all(running)
        else:
            for reference in running.values():
                self._ray.cancel(reference, force=True)
        if self._mine:
            self._ray.shutdown()


def _wait_for_all(futures: Mapping[Future[Any], Any]) -> None:
    wait(futures)  # under a name of its own, because `wait` is a parameter of `Executor.shutdown`


def _on_node(
    folder: str,
    surroundings: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Compute a call with the folder and the variables of who asked, so that a relative path means the same."""
    torch.set_num_threads(1)
    os.environ.update(surroundings)
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    return function(*args, **kwargs)


def _connect(ray: Any, address: str | None, jobs: int) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        # Statistics of use are sent to Ray's makers unless that is said; a Ray that lives for one command has none to send.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # "local": None would take what RAY_ADDRESS names.
        ray.init("local", num_cpus=jobs, include_dashboard=False, **quiet)
        return
    if address != "auto":
        _reach(address)
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"no Ray cluster to join at --address {address}: {error}. {_REMEDY}") from error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(f'--backend ray needs ray; pip install "icrl-gym[distributed]" ({error}).') from error
    return ray


def _reach(address: str) -> None:
    """Say within seconds that nobody answers; Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ValueError(f'--address must be "HOST:PORT" of a Ray cluster, or "auto"; got {address!r}. {_REMEDY}')
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no Ray cluster answers at --address {address}: {error}. {_REMEDY}") from error

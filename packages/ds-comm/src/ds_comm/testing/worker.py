"""One rank of the pool: runs the tasks that arrive on its channel until that closes.

See [Note: conversation of one call] in ``messages``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import operator
import os
import pickle
import random
import reprlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType, TracebackType
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from ds_comm.testing.messages import Closed, Failure, Formed, Reply, Success, Task

__all__ = ["main"]

_PARENT_POLL_S = 1.0
# The pool's own deadline comes first: it can tell where every rank stands, gloo cannot.
_GROUP_TIMEOUT_MARGIN_S = 30.0


@dataclass
class ModuleCache:
    """Modules loaded from files, read again when the file changes."""

    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    def load(self, name: str, path: str) -> ModuleType:
        """Return the module ``name`` whose source is ``path``.

        A module that an ordinary import finds at that very path is imported; anything else (test
        files) is executed from the file and registered under ``name``, so that pickled instances
        of its classes resolve to the same objects.
        """
        stat = os.stat(path)
        stamp = (stat.st_mtime_ns, stat.st_size)
        present = sys.modules.get(name)
        if present is not None and path not in self.stamps and _same_file(present, path):
            return present
        if present is not None and self.stamps.get(path) == stamp and _same_file(present, path):
            return present
        if path not in self.stamps and _importable(name, path):
            return importlib.import_module(name)
        module = _execute(name, path)
        self.stamps[path] = stamp
        return module


def _same_file(module: ModuleType, path: str) -> bool:
    return module.__file__ is not None and os.path.realpath(module.__file__) == path


def _importable(name: str, path: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == path


def _execute(name: str, path: str) -> ModuleType:
    parent = ""
    for part in name.split(".")[:-1]:
        parent = f"{parent}.{part}" if parent else part
        # pickle imports the parents of a dotted name; folders of tests are no packages.
        sys.modules.setdefault(parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise
    return module


@contextlib.contextmanager
def _rank_state(task: Task) -> Iterator[None]:
    """Environment, seeds and process group of one call; everything is undone on exit."""
    environ = dict(os.environ)
    cwd = os.getcwd()
    sys.path[:] = list(task.sys_path)
    os.environ.update(
        RANK=str(task.rank),
        LOCAL_RANK=str(task.rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_WORLD_SIZE=str(task.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.master_port),
    )
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{task.store_path}",
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout_s + _GROUP_TIMEOUT_MARGIN_S),
        )
        yield
    finally:
        _leave_groups(f"{task.store_path}.{task.rank}")
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(cwd)


def _leave_groups(solo_path: str) -> None:
    """Destroy all process groups and set torch's count of them back to zero.

    Group names, which are keys in the store, come from that count.  It is reset only by destroying
    a default group: one that failed to form, here or in the function, would leave this rank with
    other keys than its peers, and the next rendezvous would hang.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{solo_path}", rank=0, world_size=1)
    dist.destroy_process_group()


def _call(task: Task, cache: ModuleCache) -> Reply:
    function: Callable[..., object]
    try:
        module = cache.load(task.module, task.path)
        function = operator.attrgetter(task.qualname)(module)
        args, kwargs = pickle.loads(task.payload)
        result = function(*args, **kwargs)
    except BaseException as error:  # also SystemExit and pytest's outcomes: all are the caller's
        return _failure(error, task.path)
    try:
        return Success(pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # pickle raises whatever the object's own methods raise
        return _failure(TypeError(f"the result of {task.qualname} cannot be pickled: {error}"), "")


def _failure(error: BaseException, path: str) -> Failure:
    at_s = time.monotonic()
    lines = traceback.format_exception(type(error), error, _below_this_file(error.__traceback__))
    if isinstance(error, AssertionError):
        lines += _local_values(error.__traceback__, path)
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    return Failure(
        traceback="".join(lines).rstrip(),
        summary=summary.splitlines()[0] if summary else type(error).__name__,
        at_s=at_s,
        exception=_pickled_exception(error),
        skipped=_skip_reason(error),
    )


def _below_this_file(tb: TracebackType | None) -> TracebackType | None:
    """Drop the frames of the worker itself from the top of a traceback."""
    start = tb
    while start is not None and start.tb_frame.f_code.co_filename == __file__:
        start = start.tb_next
    return tb if start is None else start


def _local_values(tb: TracebackType | None, path: str) -> list[str]:
    """Values of the innermost frame of the test file, in place of pytest's rewritten asserts."""
    values: dict[str, object] = {}
    while tb is not None:
        if os.path.realpath(tb.tb_frame.f_code.co_filename) == path:
            values = dict(tb.tb_frame.f_locals)
        tb = tb.tb_next
    short = reprlib.Repr()
    short.maxother = short.maxstring = 300
    return [f"    {name} = {short.repr(value)}\n" for name, value in values.items()]


def _pickled_exception(error: BaseException) -> bytes | None:
    try:
        blob = pickle.dumps(error)
        pickle.loads(blob)
    except Exception:  # pickle raises whatever the object's own methods raise
        return None
    return blob


def _skip_reason(error: BaseException) -> str | None:
    pytest = sys.modules.get("pytest")  # there if the function's file has imported it
    if pytest is not None and isinstance(error, pytest.skip.Exception):
        return str(error)
    return None


def _watch_parent(parent_pid: int) -> None:
    """End this process when the one that started it is gone, also in the middle of a task."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
    os._exit(0)


def _serve(channel: Connection) -> None:
    cache = ModuleCache()
    while True:
        task = channel.recv()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_rank_state(task))
            except Exception as error:  # torch raises many kinds; report it and stay alive
                reply: Reply = _failure(error, "")
            else:
                channel.send(Formed())
                channel.recv()  # Go
                reply = _call(task, cache)
            sys.stdout.flush()
            sys.stderr.flush()
            channel.send(reply)
            channel.recv()  # Close
            del reply
        # Cycles of the finished call may own threads, groups and much memory.
        gc.collect()
        sys.stdout.flush()
        channel.send(Closed())


def main(channel_fd: int) -> NoReturn:
    """Serve tasks from a file descriptor until it closes or the parent process ends."""
    channel = Connection(channel_fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(channel)
    sys.stdout.flush()
    os._exit(0)  # atexit handlers of torch take longer than a test

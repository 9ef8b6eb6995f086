"""Plans the next step in another process, while this one trains.

With many replicas a plan takes up to a second, in which GPUs would wait. A thread would not help: planning is Python,
and so is launching kernels. `main` is the other process.
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harts.plan.make import make_plan
from harts.plan.schedule import Plan
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["PlanAhead"]


class PlanAhead:
    """Makes one plan at a time in a process of its own, which starts with the first and ends with the `with` block."""

    def __init__(self) -> None:
        self.failure = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = False

    def submit(self, tree: PrefixTree, **arguments: Any) -> None:
        """Starts to plan; `arguments` are those of `make_plan`. Does nothing once the process has failed."""
        assert not self._waiting, "the plan before has not been taken"
        if self.failure:
            return
        message = pickle.dumps((_bare(tree), arguments), protocol=5)
        try:
            if self._process is None:
                self._process = _start()
            assert self._process.stdin is not None
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except OSError as error:
            self._fail(error)
        else:
            self._waiting = True

    def take(self) -> Plan | None:
        """The plan submitted before; None if there was none or the process has failed, of which `failure` tells.

        Raises:
            ValueError: what `make_plan` raised.
        """
        if not self._waiting:
            return None
        self._waiting = False
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            result = pickle.load(self._process.stdout)
        except Exception as error:  # it died, or something else wrote to its standard output
            self._fail(error)
            return None
        if isinstance(result, ValueError):
            raise result
        assert isinstance(result, Plan), f"expected a plan from the planning process, got {type(result).__name__}"
        return result

    def _fail(self, error: Exception) -> None:
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=1)  # the pipe closes before the process has ended
        self.failure = f"the process that plans ahead ended (exit code {code}, {type(error).__name__}: {error})"
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process, self._waiting = self._process, None, False
        if process is not None:
            process.kill()  # what it works on is not wanted any more
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # what is left in the buffer of a pipe that nobody reads
                        stream.close()


def _start() -> "subprocess.Popen[bytes]":
    path = [*filter(None, sys.path), str(Path(__file__).parents[2])]  # where this process finds its modules
    program = "import sys; sys.path[:] = sys.argv[1:]; from harts.plan.ahead import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the training process, which lets the step in hand end
    )


def _bare(tree: PrefixTree) -> PrefixTree:
    """The tree without what plans do not look at, such as recorded experts."""
    bare = (
        Trajectory(
            token_ids=each.token_ids,
            loss_mask=each.loss_mask,
            temperature=each.temperature,
            id=each.id,
            group=each.group,
        )
        for each in tree.trajectories
    )
    return dataclasses.replace(tree, trajectories=tuple(bare))


def main() -> None:
    """Reads (tree, arguments) after (tree, arguments) from standard input and writes plans, or what went wrong."""
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that prints may write between the plans
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody waits for the plan any more: ends without a word
    while True:
        try:
            tree, arguments = pickle.load(source)
        except (EOFError, pickle.UnpicklingError):  # the training process ended, perhaps while it wrote
            return
        try:
            result: Any = make_plan(tree, **arguments)
        except ValueError as error:
            result = error
        pickle.dump(result, target, protocol=5)
        target.flush()

"""A proof that is made while a search uses another core, and used if it is needed then."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

from memplan.programs.proof import Fact, ProofOptions
from memplan.strategies.base import Problem
from memplan.strategies.proof_apart import ProofApart
from memplan.strategies.spaces.space import Proving
from memplan.util.stop import Stop

# Part of the time left that the proof gets: a solve may end a little late.
SHARE = 0.9

# Programs of graphs with more ops than this take long to build, while Python's lock is held:
# searches of 647 and 2,152 ops made half of their moves. These are built in another process. Set on
# networks of benchmarks/gaps.py.
MOST_BESIDE = 500

# Two threads of Python take turns so often meanwhile: a search has many short calls between which
# it needs Python's lock, and by default it waits for 5 ms each time. Set on the zoo's ResNet-50,
# whose search makes a sixth more moves by it.
TURN_SECONDS = 1e-4

# Those that run in threads: the last one to end gives back the turns that there were before.
_RUNNING: list[ProofBeside] = []


class ProofBeside:
    """What ``problem.space`` proves with ``options``, until :meth:`facts` asks for it.

    :meth:`begin` lets a thread prove it. Solvers and compiled functions run without Python's lock,
    so that takes few moves from a search on another core; of larger graphs a process proves it.
    Where there is no other core, or no thread can be started, or the solver cannot be stopped, it
    is proved when it is asked for. What is proved is the same, unless the clock cuts it. At the end
    of the ``with`` block the thread, or process, ends.
    """

    def __init__(self, problem: Problem, stop: Stop, options: ProofOptions) -> None:
        self._problem, self._stop, self._options = problem, stop, options
        self._until = stop
        self._facts: list[Fact] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._apart: ProofApart | None = None
        self._turn_seconds = sys.getswitchinterval()

    def begin(self) -> None:
        """Prove it beside the search, where that does not delay it."""
        if len(os.sched_getaffinity(0)) == 1 or self._options.solver != "HIGHS":
            return
        self._until = self._share()
        if len(self._problem.graph.ops) <= MOST_BESIDE:
            self._begin_thread()
        else:
            with suppress(OSError):  # as many processes run as may
                graph, budget_nbytes = self._problem.graph, self._problem.budget_nbytes
                assert budget_nbytes is not None
                self._apart = ProofApart(graph, budget_nbytes, self._until, self._options)

    def _begin_thread(self) -> None:
        for other in _RUNNING[:1]:
            self._turn_seconds = other._turn_seconds
        _RUNNING.append(self)
        sys.setswitchinterval(TURN_SECONDS)
        self._thread = threading.Thread(target=self._try, name="memplan-proof", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # as many threads run as may
            self._thread = None
            self._give_back_turns()

    def _share(self) -> Stop:
        """A stop of its own, with the clock's part of what is left: the search has other work."""
        return Stop(time.monotonic() + SHARE * self._stop.seconds_left)

    def _try(self) -> None:
        try:
            self._prove()
        except BaseException as error:
            self._error = error

    def _prove(self) -> None:
        proving = Proving(self._problem, self._until, self._options, self._facts)
        self._problem.space.prove(proving)

    def facts(self) -> list[Fact]:
        """What is proved in the end; so far, where an interrupt has ended the search."""
        is_interrupted = self._stop.is_ended
        if is_interrupted:
            self._until.end()
        proved = None if self._apart is None or is_interrupted else self._apart.proved()
        if proved is not None:
            self._facts.append(Fact(None, proved.seconds))
            if proved.cut_by_clock:
                self._until.cut()
        elif self._thread is None:
            self._until = self._share()
            # The first program of a large graph takes a second to build, and more on a busy core.
            if not self._until.is_over():
                self._prove()
        else:
            self._thread.join()
        if self._error is not None:
            raise self._error
        if self._until.cut_by_clock:
            self._stop.cut()
        return self._facts

    def __enter__(self) -> ProofBeside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._apart is not None:
            self._apart.end()
        if self._thread is not None:
            self._until.end()
            self._thread.join()
            self._give_back_turns()

    def _give_back_turns(self) -> None:
        _RUNNING.remove(self)
        if not _RUNNING:
            sys.setswitchinterval(self._turn_seconds)

"""A higher bound that a process of its own proves.

The programs of a graph of a thousand ops take long to build, while Python's lock is held: in a
thread they would take half of the moves of a search. A process takes none, but a second to start.
"""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import tempfile

from memplan.programs.order_tree import raise_bound
from memplan.programs.proof import ProofOptions
from memplan.step.graph import TrainingGraph
from memplan.util.processes import calling_main, check_can_start, end_with
from memplan.util.stop import Stop


@dataclasses.dataclass(frozen=True)
class Proved:
    """What is proved, and whether time was too short for more."""

    seconds: float
    cut_by_clock: bool


class ProofApart:
    """What :func:`memplan.programs.order_tree.raise_bound` proves before ``stop`` is over."""

    def __init__(
        self, graph: TrainingGraph, budget_nbytes: int, stop: Stop, options: ProofOptions
    ) -> None:
        """Begin; OSError where no process can be started."""
        check_can_start()
        # A pipe would hold the search up until the process has started and reads it.
        with tempfile.TemporaryFile() as asked:
            pickle.dump((graph.to_json(), budget_nbytes, stop.deadline, options), asked)
            asked.seek(0)
            self._popen = subprocess.Popen(
                calling_main(__name__),
                stdin=asked,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in a terminal is for the search
            )

    def proved(self) -> Proved | None:
        """What is proved in the end; None if the process has failed."""
        assert self._popen.stdout is not None
        answer = self._popen.stdout.read()
        return None if self._popen.wait() else pickle.loads(answer)

    def end(self) -> None:
        """End the process, if it still runs."""
        self._popen.kill()
        self._popen.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


def main() -> None:
    """Answer on stdout what is asked on stdin, for as long as the parent lives."""
    if not end_with(int(sys.argv[1])):
        return
    text, budget_nbytes, deadline, options = pickle.load(sys.stdin.buffer)
    graph, stop = TrainingGraph.from_json(text), Stop(deadline)
    highest = graph.seconds
    for fact in raise_bound(graph, budget_nbytes, stop, options):
        highest = max(highest, fact.bound_seconds)
    pickle.dump(Proved(highest, stop.cut_by_clock), sys.stdout.buffer)

"""MXNet's executor in two halves: it stops where the second half of a step begins."""

from __future__ import annotations

import ctypes

import mxnet as mx

from memplan.errors import DependencyError
from memplan.mxnet.realise.engine import hidden_function
from memplan.step.halves import second_half
from memplan.step.schedule import Schedule

# GraphExecutor::RunOps(bool, size_t, size_t), which no function of the C API calls with these
# arguments. An executor's handle is a pointer to it. Whether all libraries show it is not known.
_RUN = hidden_function("_ZN5mxnet4exec13GraphExecutor6RunOpsEbmm")
if _RUN is not None:
    _RUN.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_size_t, ctypes.c_size_t]


class ExecutorHalves:
    """The halves of a step: ``executor`` runs ``schedule``, as lowered for it."""

    def __init__(self, executor: mx.executor.Executor, schedule: Schedule) -> None:
        """DependencyError for an MXNet that hides what this needs, or runs other ops."""
        kinds = ("Variable:", "Op:")
        nodes = [line for line in executor.debug_str().splitlines() if line.startswith(kinds)]
        ops = [place for place, line in enumerate(nodes) if line.startswith("Op:")]
        if _RUN is None or len(ops) != len(schedule.ops):
            raise DependencyError(
                "this MXNet cannot run a step in two halves; use realisation='packed'"
            )
        begin = second_half(schedule)
        self._executor, self._end = executor, len(nodes)
        self._begin = ops[begin] if begin < len(ops) else self._end

    def first(self) -> None:
        """Run the first half.

        As behind ``forward``, the outputs are asked for anew: the executor did not know the shape
        of what a cond or a while_loop returns.
        """
        self._run(0, self._begin)
        self._executor.outputs = self._executor._get_outputs()

    def second(self) -> None:
        """Run the second half."""
        self._run(self._begin, self._end)

    def _run(self, begin: int, end: int) -> None:
        assert _RUN is not None  # or there would be no object
        _RUN(self._executor.handle, True, begin, end)

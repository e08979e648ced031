"""What the executors of a Module, or of several in turn, share on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import mxnet as mx

from memplan.mxnet.train.arrays.input_memory import InputMemory
from memplan.mxnet.train.modules.module_gradients import ModuleGradients
from memplan.mxnet.train.pool import Need, Pool, release

if TYPE_CHECKING:
    from memplan.mxnet.train.modules.module_executor import Executor

NDArray = Any
Arrays = dict[str, NDArray]


@dataclass
class Device:
    """What the ``executors`` of one device share: ``nruns`` counts what ran in ``pool``.

    In ``inputs`` lie their arrays for data, labels and states; ``gradients`` are those that are
    added up for them, each as large as the largest so far. ``written`` are all others, of steps.
    """

    # No references: MXNet's memory is free as soon as nobody holds the first executor.
    executors: WeakSet[Executor] = field(default_factory=WeakSet)
    pool: Pool = field(default_factory=Pool)
    inputs: InputMemory = field(default_factory=InputMemory)
    gradients: Arrays = field(default_factory=dict)
    written: ModuleGradients = field(default_factory=ModuleGradients)
    nruns: int = 0

    def make_room(self, need: Need, ctx: mx.Context) -> None:
        """Give up what is bound if ``need`` would exceed the budget beside it."""
        if not self.pool.admits(need):
            self.clear(ctx)

    def clear(self, ctx: mx.Context) -> None:
        """Give up what is bound."""
        for executor in self.executors:
            executor.give_up()
        self.written.clear()
        self.pool.clear()
        release(ctx)

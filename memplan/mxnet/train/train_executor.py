"""Binds a schedule for training: like MXNet's executor, but its forward is the whole step."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import mxnet as mx
import numpy as np

from memplan.errors import ArgumentError, UsageError
from memplan.memory.packing import Packing
from memplan.mxnet.realise.bind import (
    Arrays,
    ArraysToBind,
    NDArray,
    bind_as_it_stands,
    bind_inference,
)
from memplan.mxnet.realise.engine import HiddenWrites, to_default_layout
from memplan.mxnet.realise.estimate.matrix_buffers import kept_below
from memplan.mxnet.realise.explicit import training_symbol
from memplan.mxnet.realise.generators import Generators, draws
from memplan.mxnet.realise.halves import ExecutorHalves
from memplan.mxnet.realise.kept_operators import KeptOperators
from memplan.mxnet.realise.late_sums import gradients_added_late
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.monitor import without_copies, without_readers
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.packed_step import PackedStep
from memplan.mxnet.realise.placed_arrays import address_of
from memplan.mxnet.realise.update_calls import Updates
from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.form import is_in_halves
from memplan.mxnet.train.arrays.bound_arrays import BoundArrays, Gradients
from memplan.mxnet.train.arrays.end_of_process import wait_at_exit
from memplan.mxnet.train.arrays.last_forward import LastForward
from memplan.mxnet.train.fixed_gammas import gammas_without_gradient
from memplan.planning.realisation import check_is_context
from memplan.step.schedule import Schedule
from memplan.util.heap import give_back_what_is_free, keep_below
from memplan.util.numbers import shown

# By the end of so many steps MXNet has made its workspaces and kernels: the second one finds arrays
# in layouts that the first has left.
FIRST_STEPS = 2


class TrainExecutor(BoundArrays):
    """Runs training steps by a schedule; used like ``mx.executor.Executor``.

    ``forward(is_train=True)`` computes outputs and gradients; ``backward()`` has nothing left to
    do. ``forward()`` alone is MXNet's ordinary inference on the same arrays. A plan is for the
    shapes for which it was made, so there is no ``reshape``.

    A gradient with ``grad_req`` "write" is an output of the graph: ``grad_dict`` holds that very
    array, unless ``args_grad`` names another, into which it is copied after every step. With
    "add" it is added to the array in ``args_grad`` (zeros if none is given). ``head_grads`` holds
    the gradients of outputs that are no losses, by the names ``_head_grad_0``… of their positions:
    ones, until others are written into them. A plan made for "updating" leaves no gradients: they
    are used up by ``updates`` within the step.

    The ``schedule`` of an explicit ``trace`` is bound on ``ctx`` (None: the current context).
    Arrays are made, filled with zeros, for the arguments and states that are not given. The step
    computes in the memory of ``pool``, as far as that reaches, and MXNet's allocator works under
    ``match_range``: :mod:`memplan.mxnet.realise.bind`. A trace made for "packed" runs in ``memory``
    instead, if that is large enough; this and ``packing`` are those of
    :class:`memplan.mxnet.realise.packed_step.PackedStep`. The objects of Custom ops are in
    ``operators``, or new ones; without ``keeps_operators`` packed steps make those that are not in
    ``operators`` anew for every step. ``updates`` does the updates of one made for "updating".
    Raises ArgumentError for an array that is unknown or of the wrong shape or dtype, for a
    ``match_range`` that is no whole number and for what is no trace, schedule or context;
    UsageError for a trace with NumPy's shapes where MXNet has its own.
    """

    def __init__(
        self,
        trace: Trace,
        schedule: Schedule,
        *,
        ctx: mx.Context | None = None,
        args: Arrays | None = None,
        args_grad: Arrays | None = None,
        aux_states: Arrays | None = None,
        pool: mx.executor.Executor | None = None,
        match_range: int | None = None,
        memory: PackedMemory | None = None,
        keeps_operators: bool = True,
        operators: KeptOperators | None = None,
        updates: Updates | None = None,
        packing: Packing | None = None,
    ) -> None:
        _check(trace, schedule, ctx)
        self.trace, self.schedule = trace, schedule
        self._symbol = trace.symbol  # which MXNet's Monitor asks for names
        self.ctx = mx.context.current_context() if ctx is None else ctx
        self._arguments = trace.symbol.list_arguments()
        self.arg_dict = self._arrays("args", self._arguments, args)
        states = trace.symbol.list_auxiliary_states()
        self.aux_dict = self._arrays("aux_states", states, aux_states)
        self._matrices = [array for n, array in self.arg_dict.items() if len(trace.shapes[n]) > 1]
        self.head_grads = self._head_grads()
        # The arguments of which the step leaves gradients.
        names = [] if trace.form.updates else wanted(trace.grad_req)
        array_names = [n for n in names if trace.grad_req[n] == "add" or n in (args_grad or {})]
        self._own_grads = self._arrays("args_grad", array_names, args_grad)
        #: The variables by which the step reads gradients to which it adds, by argument.
        self._old_grads = {name: node.name for name, node in trace.old_gradients.items()}
        self._warn_of_late_sums()
        on_cpu = self.ctx.device_type == "cpu"
        gammas = gammas_without_gradient(trace) if on_cpu else []
        is_packed = trace.form.in_one_array
        # An operator that is called alone fixes them, as a block does, and an executor's does not.
        self._kept_gammas = gammas if keeps_operators and is_packed else []
        self._fixed_gammas = [] if keeps_operators or is_packed else gammas
        self._operators = operators or (KeptOperators() if keeps_operators else None)
        self._training: PackedStep | mx.executor.Executor = (
            self._packed(memory, packing, updates)
            if is_packed
            else self._in_blocks(pool, match_range)
        )
        hidden = [] if is_packed else self.aux_arrays
        self._generators = Generators(draws(trace.nodes), are_kept=not is_packed)
        #: The thread whose random numbers MXNet's executor would draw; None: that which runs it.
        self.binding = threading.current_thread() if keeps_operators else None
        self._hidden_writes = HiddenWrites(hidden, self._training.outputs, self.ctx)
        self._nsteps = 0
        self._last = LastForward()
        self._kept_below = kept_below(trace.nodes)
        wait_at_exit(self, self._training.outputs)
        self._inference: mx.executor.Executor | None = None
        self._monitor: tuple[Callable[..., Any], bool] | None = None
        self._noutputs = len(trace.symbol.list_outputs())
        self.outputs: list[NDArray] = self._training.outputs[: self._noutputs]
        self._computed = dict(zip(names, self._training.outputs[self._noutputs :], strict=True))
        self._copied = self._apart()
        self.grad_dict = Gradients({**self._computed, **self._own_grads})

    def _warn_of_late_sums(self) -> None:
        """A warning where the step cannot add gradients as MXNet does."""
        added_late = gradients_added_late(self.trace, self.ctx.device_type)
        if added_late:
            warnings.warn(
                f"the gradient of {', '.join(map(repr, added_late))} (grad_req='add') is added up "
                f"behind the step, where MXNet adds it row by row, picture by picture, window by "
                f"window, iteration by iteration or, as a sum of five and more terms, term by "
                f"term: the last bits may differ from an unplanned loop; those of an Embedding are "
                f"equal in packed steps, those of a convolution, and of a pooling by maxima or "
                f"averages, mostly with oneDNN (MXNET_MKLDNN_ENABLED=1)",
                stacklevel=4,
            )

    def _apart(self) -> list[tuple[NDArray, NDArray]]:
        """What the step leaves in one place for several gradients, and arrays of their own for it.

        Both terms of a sum have one gradient, and whoever scales the gradients scales each.
        """
        taken, pairs = set(), []
        for name, array in self._computed.items():
            if name in self._own_grads or array.stype != "default" or not array.size:
                continue
            if (address := address_of(array)) in taken:
                self._computed[name] = array.copy()
                pairs.append((array, self._computed[name]))
            taken.add(address)
        return pairs

    @property
    def inputs(self) -> dict[str, NDArray]:
        """What a step reads, but for auxiliary states, by the names of the variables."""
        old = {variable: self._own_grads[name] for name, variable in self._old_grads.items()}
        return {**self.arg_dict, **self.head_grads, **old}

    def _packed(
        self, memory: PackedMemory | None, packing: Packing | None, updates: Updates | None
    ) -> PackedStep:
        """The step in one array."""
        ones = {name: mx.nd.ones_like(self.arg_dict[name]) for name in self._kept_gammas}
        return PackedStep(
            self.trace,
            self.schedule,
            ctx=self.ctx,
            arrays={**self.inputs, **self.aux_dict, **ones},
            gradients={n: a for n, a in self._own_grads.items() if self.trace.grad_req[n] == "add"},
            memory=memory,
            packing=packing,
            operators=self._operators,
            updates=updates,
        )

    def _in_blocks(
        self, pool: mx.executor.Executor | None, match_range: int | None
    ) -> mx.executor.Executor:
        """The step in MXNet's blocks."""
        symbol = training_symbol(self.trace, self.schedule)
        arrays = ArraysToBind(self.ctx, self.inputs, self.aux_dict, pool, self._operators)
        return bind_as_it_stands(symbol, arrays, match_range=match_range)

    def _arrays(self, kind: str, names: Sequence[str], arrays: Arrays | None) -> dict[str, NDArray]:
        if not isinstance(arrays, Mapping | None):
            raise ArgumentError(
                f"{kind} must be a dictionary of arrays by their names (of a list: "
                f"dict(zip(names, arrays))), got {shown(arrays)}"
            )
        for name in arrays or {}:
            if name not in names:
                raise ArgumentError(f"{kind} has an array for {name!r}, which needs none")
        return {name: self._array(kind, name, (arrays or {}).get(name)) for name in names}

    def _array(self, kind: str, name: str, array: NDArray | None) -> NDArray:
        shape, dtype = self.trace.shapes[name], self.trace.dtypes[name]
        if array is None:
            return mx.nd.zeros(shape, self.ctx, dtype)
        if (array.shape, np.dtype(array.dtype).name, array.ctx) != (shape, dtype, self.ctx):
            raise ArgumentError(
                f"{kind}[{name!r}] is {array.shape} {np.dtype(array.dtype).name} on "
                f"{array.ctx}; it must be {shape} {dtype} on {self.ctx}"
            )
        return array.as_nd_ndarray()

    def _head_grads(self) -> dict[str, NDArray]:
        """``_head_grad_i`` of every output i that is no loss: ones, to be overwritten."""
        infos = {node.name: node.infos.outputs[0] for node in self.trace.head_grads.values()}
        return {
            name: mx.nd.ones(info.shape, self.ctx, info.dtype)
            for name, info in infos.items()
            if info is not None
        }

    @property
    def pool(self) -> mx.executor.Executor | None:
        """The executor whose memory others may share; None in packed memory."""
        return None if isinstance(self._training, PackedStep) else self._training

    @property
    def memory(self) -> PackedMemory | None:
        """The memory in which packed steps run, and others may."""
        return self._training.memory if isinstance(self._training, PackedStep) else None

    @property
    def grad_arrays(self) -> list[NDArray | None]:
        """The gradients in the order of the arguments; None where there is none."""
        return [self.grad_dict.get(name) for name in self._arguments]

    @property
    def output_dict(self) -> dict[str, NDArray]:
        """The outputs of the last forward, by name."""
        return dict(zip(self.trace.symbol.list_outputs(), self.outputs, strict=True))

    def draws_here(self) -> bool:
        """Are the random numbers that a step draws, if any, those of this thread?"""
        return self._generators.are_of(threading.current_thread())

    def forward(self, is_train: bool = False, **values: Any) -> list[NDArray]:
        """Set the arguments ``values``, then run a training step, or inference; the outputs."""
        self._set(values)
        self._last.begin(is_train=is_train)
        if self._operators is not None:
            self._operators.wait_for(self.outputs)
        if is_train:
            self._check(self._generators)
            self._begin()
            self.outputs = self._training.forward(is_train=True)[: self._noutputs]
            self._finish()
        else:
            inference = self._inference or self._bound_inference()
            self._check(self._inferring)
            self.outputs = inference.forward(is_train=False)
        return self.outputs

    def _bound_inference(self) -> mx.executor.Executor:
        """An executor for inference on the arrays by which it trains."""
        operators = self._operators
        arrays = ArraysToBind(self.ctx, self.arg_dict, self.aux_dict, operators=operators)
        self._inference = bind_inference(self.trace.symbol, arrays, traced=self.trace)
        is_random = draws(self.trace.nodes, in_training=False)
        self._inferring = Generators(is_random, are_kept=True)
        self._watch_inference()
        return self._inference

    def _check(self, generators: Generators) -> None:
        """Warn where MXNet's executor would draw of others than these."""
        if self.binding is not None:
            generators.check(self.binding)

    def forward_half(self, **values: Any) -> list[NDArray]:
        """Set the arguments ``values``, then run the first half of a step; the outputs.

        The network is one whose variables say that the step runs in halves
        (:data:`memplan.mxnet.trace.form.IN_HALVES`). The outputs stay until the next step.
        UsageError for another one, whose outputs may be computed in the second half.
        """
        self._set(values)
        self._last.begin(is_train=True)
        halves = self._halves
        self._begin()
        halves.first()
        self.outputs = self._training.outputs[: self._noutputs]
        return self.outputs

    def backward_half(self, more: Arrays) -> None:
        """Run the second half, which reads ``head_grads``; the gradients are those and ``more``."""
        self._halves.second()
        self._finish(more)

    @cached_property
    def _halves(self) -> PackedStep | ExecutorHalves:
        if not is_in_halves(self.trace.nodes):
            raise UsageError(
                "the plan is for whole steps, and cannot be run in halves; TrainStep(block) plans "
                "for forward() and backward()"
            )
        if isinstance(self._training, PackedStep):
            return self._training
        return ExecutorHalves(self._training, lower(self.trace, self.schedule).schedule)

    def _begin(self) -> None:
        """Before a step: the engine learns what the step reads and writes unknown to it."""
        if self.ctx.device_type != "gpu":
            if not self._nsteps:
                give_back_what_is_free()  # such as what a Module's parameters were initialised by
            keep_below(self._kept_below if self._nsteps >= FIRST_STEPS else 0)
            self._nsteps += 1
        to_default_layout(self._matrices)
        for name in self._fixed_gammas:
            self.arg_dict[name][:] = 1
        self._hidden_writes.begin()

    def _finish(self, more: Arrays | None = None) -> None:
        """After a step: gradients, ``more`` added to them, go where they are wanted."""
        self._hidden_writes.end()
        for source, array in self._copied:
            source.copyto(array)
        for name, array in (more or {}).items():
            self._computed[name] += array
        for name, array in self._own_grads.items():
            if array is self._computed[name]:
                continue  # a packed step has written it, or added to it
            if self.trace.grad_req[name] == "add" and name not in self._old_grads:
                array += self._computed[name]
            else:
                self._computed[name].copyto(array)

    def backward(self, out_grads: Any = None, is_train: bool = True) -> None:
        """Nothing: ``forward(is_train=True)`` has left the gradients in ``grad_dict``.

        Raises ArgumentError for ``out_grads``, which come too late: set ``head_grads`` before.
        Where all outputs are losses, and there are none, they are ignored, as in MXNet. UsageError
        after an inference, which has left no gradients.
        """
        self._last.check()
        is_empty = isinstance(out_grads, list | tuple | dict) and not out_grads
        if self.head_grads and out_grads is not None and not is_empty:
            raise ArgumentError(
                "the gradients are computed in forward(is_train=True): put the gradients of the "
                "outputs into head_grads before it, not into backward()"
            )

    def set_monitor_callback(self, callback: Callable[..., Any], monitor_all: bool = False) -> None:
        """Call ``callback`` with the outputs of all ops of the network, as MXNet's executor does.

        UsageError for ``monitor_all`` in packed memory.
        """
        self.watch(without_copies(callback, self.trace, self.schedule), monitor_all)
        self._monitor = callback, monitor_all
        self._watch_inference()

    def watch(self, callback: Callable[..., Any], monitor_all: bool = False) -> None:
        """Call ``callback`` with the outputs of all ops of a training step, the plan's own too."""
        self._training.set_monitor_callback(callback, monitor_all)

    def _watch_inference(self) -> None:
        if self._monitor is not None and self._inference is not None:
            callback, monitor_all = self._monitor
            self._inference.set_monitor_callback(without_readers(callback), monitor_all)

    def debug_str(self) -> str:
        """MXNet's description of the training step: its ops in order, and what it allocates."""
        return self._training.debug_str()


def _check(trace: Any, schedule: Any, ctx: Any) -> None:
    """ArgumentError for what is none of these three.

    UsageError for a trace with NumPy's shapes where MXNet has its own.
    """
    for name, value, kind in (("trace", trace, Trace), ("schedule", schedule, Schedule)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{name} must be that of a plan (plan.{name}), got {shown(value)}")
    if ctx is not None:
        check_is_context(ctx)
    if trace.numpy_shapes and not mx.util.is_np_shape():
        raise UsageError(
            "the plan was made with NumPy semantics, where () is the shape of a scalar; call "
            "mx.npx.set_np() before you train by it"
        )

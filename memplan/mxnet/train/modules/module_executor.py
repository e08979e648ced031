"""What a Module takes for MXNet's executor: it trains by a plan, and infers as MXNet does."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.realise.bind import ArraysToBind, bind_inference
from memplan.mxnet.realise.generators import Generators
from memplan.mxnet.realise.kept_operators import KeptOperators
from memplan.mxnet.realise.monitor import check_monitor, without_readers
from memplan.mxnet.trace.arguments import infer_arguments, storage_types
from memplan.mxnet.train.arrays.bound_arrays import BoundArrays
from memplan.mxnet.train.arrays.input_memory import view
from memplan.mxnet.train.arrays.last_forward import LastForward
from memplan.mxnet.train.modules.device import Device
from memplan.mxnet.train.modules.module_gradients import Key, key_of
from memplan.mxnet.train.modules.other_parameters import check_shared, check_unchanged
from memplan.mxnet.train.modules.plans import Plans, Request
from memplan.mxnet.train.pool import Need, training_need
from memplan.mxnet.train.train_executor import TrainExecutor
from memplan.planning.plan import Plan
from memplan.planning.realisation import may_pack

NDArray = Any
Arrays = dict[str, NDArray]
Callback = Callable[..., Any]


@dataclass(frozen=True)
class Lent:
    """The ``arrays`` in which executors that run in turn have the inputs ``names``.

    They are those of MXNet's executors, too: the ``shared_buffer`` of ``simple_bind``, which has
    states and what it has seen of data and labels, or the arrays of one that is reshaped.
    """

    names: Collection[str]
    arrays: Arrays


class Executor(BoundArrays):
    """Looks to Module like MXNet's executor: trains by a plan, and infers as MXNet does.

    The arguments ``shared_names``, their gradients if they are added up, and the auxiliary states
    are those of ``shared``, an executor of this kind or MXNet's. Inputs are in the memory of what
    is ``lent``, where that is large enough. It is bound to train, and to infer, when first needed.
    """

    #: The thread whose random numbers MXNet's executor would draw: that which binds, or reshapes.
    _binding: threading.Thread
    _inferring: Generators

    def __init__(
        self,
        net: mx.sym.Symbol,
        plans: Plans,
        request: Request,
        shared: Any,
        shared_names: Sequence[str],
        lent: Lent,
    ) -> None:
        self._symbol, self._plans, self._request = net, plans, request
        self.device: Device = shared.device if isinstance(shared, Executor) else Device()
        self.device.executors.add(self)
        self._reshaped: dict[tuple[Any, ...], Executor] = {}
        self._monitor: tuple[Callback, bool] | None = None
        self._trained, self._lacks_backward = -1, False
        self._last = LastForward()
        self._binding = threading.current_thread()
        #: For the Custom ops, in training and inference, however often these are bound.
        self.operators = KeptOperators()
        shapes, dtypes = infer_arguments(net, request.shapes, request.dtypes)
        shareable = {*shared_names, *net.list_auxiliary_states()}
        if shared:
            check_shared(shareable - shared.arg_dict.keys() - shared.aux_dict.keys())
        # As MXNet's executor has them: an optimizer updates a sparse weight in another way.
        stypes = storage_types(net)

        def array(name: str, old: Arrays) -> NDArray:
            if name in old and name in shareable:
                return old[name]
            stype = stypes.get(name, "default")
            if name in lent.names and stype == "default":
                return self._input(name, shapes[name], dtypes[name], lent.arrays)
            return mx.nd.zeros(shapes[name], request.ctx, dtypes[name], stype=stype)

        def gradient(name: str, old: Arrays, stock: Arrays) -> NDArray:
            if old.get(name) is not None and name in shareable:
                return old[name]
            part = view(stock[name], shapes[name], dtypes[name]) if name in stock else None
            if part is None:
                part = mx.nd.zeros(shapes[name], request.ctx, dtypes[name])
                if name in request.shapes:
                    stock[name] = part
            return part

        self._arguments = net.list_arguments()
        held = shared.arg_dict if shared else {}
        self.arg_dict = {name: array(name, held) for name in self._arguments}
        held = shared.aux_dict if shared else {}
        self.aux_dict = {name: array(name, held) for name in net.list_auxiliary_states()}
        names = [name for name in self._arguments if request.grad_req[name] == "add"]
        summed = shared._added if isinstance(shared, Executor) else shared and shared.grad_dict
        self._added: Arrays = {n: gradient(n, summed or {}, self.device.gradients) for n in names}
        self._written: Arrays = {}
        self._gradients: list[NDArray | None] | None = None
        self._training: TrainExecutor | None = None
        self._inference: mx.executor.Executor | None = None
        self._shared: mx.executor.Executor | None = None
        self._outputs: list[NDArray] | None = None

    def _input(self, name: str, shape: tuple[int, ...], dtype: str, lent: Arrays) -> NDArray:
        """The array of an input, in the memory where MXNet's executor would have it.

        That is the one ``lent`` by this name, of which a smaller input is a view, or a larger one,
        which is lent from then on (ReshapeOrCreate of src/common/exec_utils.h). Where its gradient
        is wanted a smaller input is no view: MXNet would take a view for the gradient, too.
        """
        held = lent.get(name)
        part = None if held is None else view(held, shape, dtype)
        is_whole = held is None or held.shape == shape or self._request.grad_req[name] == "null"
        if part is None or not is_whole:
            part = self.device.inputs.array(name, shape, dtype, self._request.ctx)
        if held is None or held.size < part.size:
            lent[name] = part
        return part

    @property
    def handle(self) -> Any:
        """MXNet's executor that a Module which only evaluates shares by ``shared_module``.

        It has memory of its own: what that Module infers overwrites nothing of a step.
        """
        if self._shared is None:
            arrays = ArraysToBind(self._request.ctx, self.arg_dict, self.aux_dict)
            self._shared = bind_inference(self._symbol, arrays)
        return self._shared.handle

    @property
    def plan(self) -> Plan | None:
        """The plan by which it trains; None as long as there is none."""
        return self._plans.plans.get(self._request.key)

    @property
    def grad_dict(self) -> Arrays:
        return dict(zip(self._arguments, self.grad_arrays, strict=True))

    @property
    def grad_arrays(self) -> list[NDArray | None]:
        """The gradients in the order of the arguments; None where there is none, or none yet."""
        if self._plans.update_within:
            return [None] * len(self._arguments)
        if self._gradients is not None:
            return self._gradients
        written = self.device.written.of(self._keys)
        arrays = {**written, **self._added}
        result = [arrays.get(name) for name in self._arguments]
        if len(written) == len(self._keys):
            self._gradients = result  # Module asks for each gradient by itself
        return result

    @cached_property
    def _keys(self) -> dict[str, Key]:
        """By what the arrays for gradients are known that steps compute."""
        requests = self._request.grad_req
        return {n: key_of(n, a) for n, a in self.arg_dict.items() if requests[n] == "write"}

    @property
    def outputs(self) -> list[NDArray]:
        """The outputs of the last forward."""
        return self.infer().outputs if self._outputs is None else self._outputs

    @property
    def output_dict(self) -> Arrays:
        return dict(zip(self._symbol.list_outputs(), self.outputs, strict=True))

    def train(self) -> TrainExecutor:
        """Its training executor, bound to the plan when first needed, or for another thread."""
        binding, here = self._binding, threading.current_thread()
        if self._training and binding is here and not self._training.draws_here():
            self._training = None  # its random numbers are another thread's; plan and memory stay
        if self._training is None:
            plan = self._plans.find(self._request)
            need, pool = training_need(plan), self.device.pool
            pool.begin(self._request.ctx)
            pool.allow(plan)
            self.device.make_room(need, self._request.ctx)
            self._training = TrainExecutor(
                plan.trace,
                plan.schedule,
                ctx=self._request.ctx,
                args=self.arg_dict,
                args_grad=self._added,
                aux_states=self.aux_dict,
                pool=pool.executor,
                match_range=plan.match_range,
                memory=pool.memory,
                operators=self.operators,
                updates=self._plans.updates,
                packing=plan.packing,
            )
            pool.add(need, self._training.pool, self._training.memory)
            computed = self._training.grad_dict.items()
            self._written = {name: a for name, a in computed if name not in self._added}
            self.device.written.add(self._written)
            self._outputs = self._outputs or self._training.outputs
            self._plans.nbound += 1
            self._watch()
        self._training.binding = binding
        return self._training

    def clear_device(self) -> None:
        """Give up what is bound on its device, for plans that are found anew."""
        self.device.clear(self._request.ctx)

    def give_up(self) -> None:
        """Free the memory in which it runs; it is bound anew when it is next needed."""
        was_bound = self._training is not None
        self._training = self._inference = self._outputs = None
        self._trained, self._written = -1, {}
        released = self._plans.released()
        if was_bound and released is not None:
            released()

    def infer(self) -> mx.executor.Executor:
        """Its executor for inference, bound when it is first needed."""
        binding, here = self._binding, threading.current_thread()
        if self._inference and binding is here and not self._inferring.are_of(here):
            self._inference = None  # as with a step
        if self._inference is None:
            ctx, pool = self._request.ctx, self.device.pool
            need = self._plans.inference_need(self._request) if pool.is_limited else Need()
            self.device.make_room(need, ctx)
            traced = self._plans.trace_of(self._request)
            arrays = ArraysToBind(ctx, self.arg_dict, self.aux_dict, pool.executor, self.operators)
            self._inference = bind_inference(self._symbol, arrays, traced=traced)
            self._inferring = Generators(self._plans.draws_in_inference, are_kept=True)
            pool.add(need, self._inference)
            self._watch()
        self._inferring.check(binding)
        return self._inference

    def forward(self, is_train: bool = False, **values: Any) -> list[NDArray]:
        """Set the arguments ``values``, then run a training step, or inference; the outputs."""
        self._set(values)
        if is_train and self._lacks_backward and (self._added or self.aux_dict):
            warnings.warn(
                "a step trained without backward() being called: BatchNorm's statistics, and "
                "gradients that are added up, changed within forward, where MXNet changes them "
                "in backward; call forward(is_train=False) for outputs only, which are those "
                "of inference; a mirror plan, trained by mx.mod.Module, has those of training "
                "mode without a step",
                stacklevel=2,
            )
        self.operators.wait_for(self._outputs or ())
        self._trained = -1
        self._last.begin(is_train=is_train)
        # A step that is refused, or whose making is interrupted, trains nothing.
        executor = self.train() if is_train else self.infer()
        self._lacks_backward = self._lacks_backward or is_train
        self.device.nruns += 1
        self._trained = self.device.nruns if is_train else -1
        if is_train:
            self.device.written.begin(self._written, inputs=self._request.shapes)
        self._outputs = executor.forward(is_train=is_train)
        if is_train:
            self._plans.note_step()
        return self._outputs

    def backward(self, out_grads: Any = None, is_train: bool = True) -> None:
        """Nothing: losses ignore ``out_grads``. ArgumentError for some before a training step.

        UsageError after an inference, which has left no gradients.
        """
        if out_grads is not None and len(out_grads) and self.plan is None:
            raise ArgumentError(
                "backward takes no out_grads before forward(is_train=True), whose losses ignore "
                "them; to train on gradients from elsewhere use mx.mod.Module"
            )
        self._last.check()
        self._lacks_backward = False

    def check_gradients(self) -> None:
        """Raises UsageError where the gradients are no longer, or not yet, there."""
        if self._lacks_backward:
            raise UsageError(
                "backward() was not called after the last forward(is_train=True), within which the "
                "gradients were computed anew: call backward() before update(), or "
                "forward(is_train=False) for outputs only"
            )
        names = {name for name, request in self._request.grad_req.items() if request == "write"}
        if names and self._trained != self.device.nruns:
            raise UsageError(
                "there are no gradients: no training step has run, or an inference or a step with "
                "other shapes has used their memory since. Call update() right after the training "
                "step (forward_backward); a Module that runs no steps, and is given gradients of "
                "another one, needs no plan: make it a mx.mod.Module"
            )

    def reshape(
        self, partial_shaping: bool = False, allow_up_sizing: bool = False, **shapes: Any
    ) -> Executor:
        """The executor for other input shapes, on the same parameters.

        ArgumentError for shapes with which a parameter would have another one, as MXNet raises an
        error there, unless ``partial_shaping``.
        """
        shapes = {name: tuple(shape) for name, shape in shapes.items() if name in self._arguments}
        request = replace(self._request, shapes={**self._request.shapes, **shapes})
        is_another = request.key != self._request.key
        if is_another and request.key not in self._reshaped:
            changed = self._changed(request)
            if not partial_shaping:
                check_unchanged(changed, shapes)
            unchanged = [name for name in self.arg_dict if name not in changed]
            lent = Lent(request.shapes, dict(self.arg_dict))
            executor = Executor(self._symbol, self._plans, request, self, unchanged, lent)
            executor._monitor = self._monitor
            self._reshaped[request.key] = executor
        for executor in (self, *self._reshaped.values()):
            executor._renew_operators()
        result = self._reshaped[request.key] if is_another else self
        result._binding = threading.current_thread()
        return result

    def _renew_operators(self) -> None:
        """Let user code, if any, forget what it kept: MXNet binds at every reshape."""
        if self._plans.has_user_code:
            self._training = self._inference = None  # plan, memory and gradients stay
            self.operators = KeptOperators()

    def _changed(self, request: Request) -> dict[str, str]:
        """The arguments and states that have other shapes in ``request``: both in words."""
        shapes, _ = infer_arguments(self._symbol, request.shapes, request.dtypes)
        arrays = {**self.arg_dict, **self.aux_dict}
        return {
            name: f"{shapes[name]}, where it is {array.shape}"
            for name, array in arrays.items()
            if array.shape != shapes[name]
        }

    def set_monitor_callback(self, callback: Callback, monitor_all: bool = False) -> None:
        """Call ``callback`` with the outputs of all ops, as MXNet's executor does.

        UsageError for ``monitor_all`` in packed memory: at once, or a step that is bound later
        would fail. So it is where the network, which is not planned yet, may be packed.
        """
        if may_pack(self._plans.realisation):
            check_monitor(monitor_all)
        for executor in (self, *self._reshaped.values()):
            executor._monitor = (callback, monitor_all)
            executor._watch()

    def _watch(self) -> None:
        if self._monitor is None:
            return
        callback, monitor_all = self._monitor
        if self._training is not None:
            self._training.set_monitor_callback(callback, monitor_all)
        if self._inference is not None:
            self._inference.set_monitor_callback(without_readers(callback), monitor_all)

    def debug_str(self) -> str:
        """MXNet's description of what it runs; where it is bound later, nothing as yet."""
        if self._training is None and self._inference is None and not self._plans.at_once:
            # Module reads the first line when it binds, which is no reason to run inference.
            return "Total 0 MB allocated\nTotal 0 TempSpace resource requested\n"
        return (self._training or self.infer()).debug_str()

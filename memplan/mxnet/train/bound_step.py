"""A plan bound to the parameters of a block on one context: it runs steps, whole or in halves."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import mxnet as mx

from memplan.mxnet.realise.own_autograd import backward_of_mxnet, mark_variables
from memplan.mxnet.realise.step_scope import recorded
from memplan.mxnet.realise.update_calls import Updates
from memplan.mxnet.trace.states import states_written
from memplan.mxnet.train.arrays.array_memory import other_handle, without_memory
from memplan.mxnet.train.arrays.constants import mark_constants
from memplan.mxnet.train.arrays.given_up import give_up_gradient
from memplan.mxnet.train.arrays.gradients import Gradients, Late
from memplan.mxnet.train.arrays.held import Held
from memplan.mxnet.train.arrays.nesting import Arrays, leaves, of_semantics, regrouped
from memplan.mxnet.train.arrays.parameters import is_derived
from memplan.mxnet.train.arrays.read_by_loss import name_of
from memplan.mxnet.train.arrays.returned_outputs import ReturnedOutputs
from memplan.mxnet.train.arrays.writes import nupdates_of
from memplan.mxnet.train.autograd_grad import refuse_grad_across
from memplan.mxnet.train.blocks.block_network import BlockNetwork
from memplan.mxnet.train.blocks.called_with_symbols import INPUT, LABEL
from memplan.mxnet.train.blocks.static_graphs import StaticObjects, renew_graphs_of
from memplan.mxnet.train.blocks.sums_of_loss import Reads, adds_as_graph
from memplan.mxnet.train.first_half import FirstHalf
from memplan.mxnet.train.parameters_of_step import arguments_of, initialised, place_of
from memplan.mxnet.train.pool import Need, Pool, inference_need
from memplan.mxnet.train.step_outputs import StepOutputs
from memplan.mxnet.train.train_executor import TrainExecutor
from memplan.planning.plan import Plan

NDArray = Any
Parameter = Any


class BoundStep:
    """A plan bound to the parameters of a block on one context.

    ``form`` is how what a step returns is nested: as in the network, in tuples of classes of now.
    """

    #: Has it been warned of the sums of gradients that several blocks compute?
    is_warned_of_shared = False

    def __init__(
        self,
        plan: Plan,
        network: BlockNetwork,
        params: Mapping[str, Parameter],
        ctx: mx.Context,
        pool: Pool,
        updates: Updates | None,
    ) -> None:
        """Bind in the memory of ``pool``.

        ``updates`` are for a plan that updates the parameters within the step.
        """
        self.network, self.form, self._pool, self.is_outdated = network, network.form, pool, False
        #: Could the trainer update within the step when this was bound?
        self.within = False
        trace, self._objects = plan.trace, StaticObjects(plan.trace, network, ctx)
        parameters = initialised(network, params, trace.shapes)
        self.arguments = arguments_of(network, params)  #: The parameters that may have gradients.
        self._derived = [p for p in parameters if is_derived(p)]
        self._read: dict[str, NDArray] = {}
        parameters = [p for p in parameters if not is_derived(p)]
        self.places = [(p, place_of(p, ctx), p.grad_req) for p in parameters]
        data = {p.name: p._data[i] for p, i, _ in self.places}
        states = set(network.symbol.list_auxiliary_states())

        def input_array(name: str) -> NDArray:
            return pool.inputs.array(name, trace.shapes[name], trace.dtypes[name], ctx)

        self.executor: TrainExecutor = TrainExecutor(
            trace,
            plan.schedule,
            ctx=ctx,
            args={
                **{name: array for name, array in data.items() if name not in states},
                **{name: input_array(name) for name in network.shapes if name in trace.shapes},
            },
            args_grad={
                p.name: p._grad[i]
                for p, i, request in self.places
                if request == "add" and p.name not in states  # which have none, whatever is asked
            },
            aux_states={name: array for name, array in data.items() if name in states},
            pool=pool.executor,
            match_range=plan.match_range,
            memory=pool.memory,
            keeps_operators=False,  # as a hybridized block, but for a static graph
            operators=self._objects.operators,
            updates=updates,
            packing=plan.packing,
        )
        self.data = [data[p.name] for p in parameters]
        grads = {name: of_semantics(grad) for name, grad in self.executor.grad_dict.items()}
        self.gradients = Gradients(
            [_held(p, i, r, data[p.name], grads) for p, i, r in self.places if p.name in grads],
            pool.earlier,
        )
        refuse_grad_across(self.gradients)
        renew_graphs_of(self.arguments)
        self.scale, self.reads = 1.0, Reads.of(network.symbol)
        #: Of which sums (parameters': True) a warning has told; losses that are known, by reads.
        self.are_warned_of, self.losses_seen = set[bool](), set[Hashable]()
        self.outputs = StepOutputs.of(self.executor, network.losses)

    def is_fit(self) -> bool:
        """May this thread run it as it is?"""
        may_write = self.is_current() and not self._pool.is_held_from(self.gradients)
        return may_write and self.executor.draws_here()

    def is_current(self) -> bool:
        """Is the network that of the block, on its arrays, and are the same gradients wanted?"""
        return (
            not self.is_outdated
            and all(map(is_derived, self._derived))
            and not any(is_derived(p) for p, _, _ in self.places)
            and all(
                p._data is not None
                and len(p._data) > place
                and p._data[place] is data
                and p.grad_req == request
                for (p, place, request), data in zip(self.places, self.data, strict=True)
            )
            and self.gradients.are_current()
        )

    def is_of(self, params: Mapping[str, Parameter]) -> bool:
        """Are its parameters those of these ``params``, and not others of the same names?"""
        return all(params.get(p.name) is p for p, _, _ in self.places)

    def prepare(self, form: Any) -> None:
        """Before a step; what it returns is nested so."""
        self.form = form
        self._objects.begin()

    @functools.cached_property
    def ninputs(self) -> int:
        """The elements of the inputs of the block."""
        shapes = self.network.shapes.items()
        return sum(math.prod(shape) for name, shape in shapes if name.startswith(INPUT))

    @functools.cached_property
    def inference_need(self) -> Need:
        """What MXNet evaluates the block in, of inputs as large as the step's."""
        return inference_need(self.executor.trace, self.executor.ctx.device_type)

    def statistics(self) -> list[Parameter]:
        """The parameters that the step itself writes, such as the statistics of a BatchNorm."""
        nodes = self.executor.trace.nodes
        names = {state.name for node in nodes for state in states_written(node)}
        return [p for p, _, _ in self.places if p.name in names]

    def nupdates(self) -> dict[str, int]:
        """How often trainers have updated each parameter."""
        return {p.name: nupdates_of(p) for p, _, _ in self.places}

    @functools.cached_property
    def returned(self) -> ReturnedOutputs:
        """The outputs that the second half of a step reads."""
        return ReturnedOutputs.of(self.executor.trace, self.executor.schedule)

    @functools.cached_property
    def read_again(self) -> dict[str, NDArray]:
        """The parameters that recomputed ops read."""
        nodes, schedule = self.executor.trace.nodes, self.executor.schedule
        names = {source.name for op in schedule.recomputed for source, _ in nodes[op].inputs}
        places = zip(self.places, self.data, strict=True)
        return {p.name: array for (p, _, _), array in places if p.name in names}

    def step(self, batch: Arrays, scale: float) -> tuple[Arrays, Arrays]:
        """Run a step; its losses and kept outputs."""
        if scale != self.scale:
            for array in self.executor.head_grads.values():
                array[:] = scale
            self.scale = scale
        statistics = self.network.statistics
        kept = statistics.kept if statistics is not None else ()
        with self.gradients.computed(), self.keeping(kept):
            self.hand_over_gradients()
            arrays = self.executor.forward(is_train=True, **self._values(batch))
        self._pass_on()
        # The next step writes into the executor's arrays.
        copies = [of_semantics(array.copy()) for array in arrays]
        losses, outputs = regrouped(self.form, iter(copies))
        return losses, outputs

    def first_half(self, batch: Arrays, block: Any) -> tuple[Arrays, FirstHalf]:
        """Run the first half of a step; its outputs, of which autograd can take the gradients.

        They are nested as the block returns them. The first half does not hold them: whether
        anybody else does says whether a loss may still be differentiated.

        Until the second half the parameters have gradients that are not there yet: what autograd
        writes into them comes from elsewhere than through the outputs, and is added. Where MXNet
        would run the ``block`` as a graph, backward goes into the block through any output, else
        through those that depend on a parameter that is trained, be it through BlockGrad.
        """
        self.gradients.lend()
        outputs_of_step = self.executor.forward_half(**self._values(batch))
        arrays = [array.copy() for array in outputs_of_step]
        as_graph = adds_as_graph(block, self.reads)
        head_grads, places = self.executor.head_grads, self.outputs
        pairs = [(arrays[i], head_grads[name]) for i, name in places.paired.items()]
        losses = [arrays[i] for i in places.losses]
        mark_constants([arrays[i] for i in places.constants])
        constants = [arrays[i] for i in places.constants if as_graph or i in places.behind_trained]
        if marked := pairs + [(array, without_memory(array)) for array in losses]:
            mark_variables(*zip(*marked, strict=True))
        # The caller's are other handles: attach_grad() of one ends what autograd knows of that one.
        handles = (of_semantics(other_handle(array)) for array in arrays)
        outputs, _ = regrouped(self.form, handles)
        self.gradients.withhold()
        inputs = {f"{INPUT}{i}": array for i, array in enumerate(leaves(batch[0]))}
        are_asked = self.network.losses or self.network.statistics
        names = list(map(name_of, arrays)) if are_asked else []
        returned = {place: arrays[place] for place in self.returned.places}
        return outputs, FirstHalf(self, pairs, losses, constants, names, as_graph, inputs, returned)

    def take_back(self, outputs: Mapping[int, NDArray]) -> None:
        """Have the second half read these ``outputs``, by their places."""
        for place, array in outputs.items():
            array.copyto(self.executor.outputs[place])

    def second_half(self) -> Late:
        """Run the second half of a step; where the gradients of what was recorded since go."""
        self.is_outdated |= self.gradients.let_go()
        self.gradients.show_written()
        beside = self.gradients.beside()
        with self.gradients.computed():
            self.executor.backward_half(beside)
            late = self.hand_over_gradients()
        self._pass_on()
        return late

    @contextlib.contextmanager
    def keeping(self, names: Collection[str]) -> Iterator[None]:
        """Within, the statistics of these ``names`` stay as they are."""
        arrays = [p.data(self.executor.ctx) for p, _, _ in self.places if p.name in names]
        if arrays:
            mx.nd.waitall()  # the engine does not know that an explicit step writes them
        kept = [array.copy() for array in arrays]
        try:
            yield
        finally:
            if arrays:
                mx.nd.waitall()
            for array, values in zip(arrays, kept, strict=True):
                array[:] = values

    def _pass_on(self) -> None:
        """Let autograd take the gradients of what was computed from parameters to these."""
        gradients = self.executor.grad_dict
        read, self._read = self._read, {}
        if pairs := [(array, gradients[n]) for n, array in read.items() if n in gradients]:
            backward_of_mxnet(*map(list, zip(*pairs, strict=True)))

    def _values(self, batch: Arrays) -> dict[str, NDArray]:
        derived, ctx = self._derived, self.executor.ctx
        self._read = recorded(lambda: {p.name: p.data(ctx) for p in derived}) if derived else {}
        inputs, labels = batch
        values = {f"{INPUT}{i}": array for i, array in enumerate(leaves(inputs))}
        values |= {f"{LABEL}{i}": array for i, array in enumerate(leaves(labels))}
        arrays = self.executor.arg_dict
        return self._read | {name: value for name, value in values.items() if name in arrays}

    def hand_over_gradients(self) -> Late:
        """Make the arrays in which the gradients will be those of the parameters, if any will."""
        if self.executor.trace.form.updates:
            for parameter, _, _ in self.places:
                give_up_gradient(parameter, self.executor.ctx)
        return self.gradients.hand_over()


def _held(
    parameter: Parameter, place: int, request: str, data: NDArray, grads: Mapping[str, NDArray]
) -> Held:
    """The gradient of a parameter: where it is added to, the parameter's own array."""
    array = parameter._grad[place] if request == "add" else grads[parameter.name]
    return Held(parameter, place, request, data, array)

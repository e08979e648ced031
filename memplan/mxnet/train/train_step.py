"""Training a Gluon block by a plan: forward, backward and recomputation in one call.

step = TrainStep(net, gluon.loss.SoftmaxCrossEntropyLoss(), budget="4GiB")
for x, y in batches:
    loss = step(x, y)
    trainer.step(x.shape[0])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd

from memplan.errors import ArgumentError, MemplanError
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.train.block_network import INPUT, LABEL, BlockNetwork, cached_graphs, compose
from memplan.mxnet.train.nesting import (
    Arrays,
    Specs,
    as_inputs,
    dtype_name,
    leaves,
    one_context,
    per_context,
    regrouped,
    specs_of,
)
from memplan.mxnet.train.pool import Pool, release, training_need, view
from memplan.mxnet.train.train_executor import TrainExecutor
from memplan.planning.plan import Plan
from memplan.planning.planner import Budget, plan
from memplan.planning.realisation import runs_whole_steps
from memplan.step.costs import Costs
from memplan.strategies import Strategy

NDArray = Any
Parameter = Any


class TrainStep:
    """Trains ``block`` by a plan: in place of autograd.record() and backward().

    ``step(x, y)`` returns the loss and leaves the gradients in the parameters, as
    ``loss.backward()`` does; then comes ``trainer.step(batch_size)``. The parameters stay those
    of ``block``, which serves for inference, saving and exporting as before. Every new combination
    of input shapes is planned when it is first seen; :attr:`plans` has them all. They share their
    memory; where that would exceed the budget, they are bound in turn. Parameters may be cast,
    frozen, moved or set anew in between. Whoever changes what a layer computes, such as the
    probability of DropBlock, calls ``block.hybridize()``, as for MXNet's own graph of the block.
    """

    def __init__(
        self,
        block: mx.gluon.HybridBlock,
        loss: Any = None,
        *,
        budget: Budget = None,
        strategy: str | Strategy = "auto",
        time_limit: float = 60,
        costs: Costs | None = None,
        reserve: int | str = 0,
        realisation: str = "explicit",
        keep_outputs: bool = False,
    ) -> None:
        """Prepare to train ``block``; nothing is planned before the first batch or :meth:`plan`.

        ``loss`` is a gluon Loss or any function of the block's outputs and the labels that works
        on Symbols; it may return several losses. A list of losses takes one output and one label
        each. None: the block itself computes the loss, of the inputs and the labels.

        ``budget`` (for one context), ``strategy``, ``time_limit`` (seconds, for each combination
        of shapes), ``costs`` and ``reserve`` are those of :func:`memplan.plan`; ``realisation``
        is "explicit" or "packed". With
        ``keep_outputs`` the block's outputs stay in memory to the end of the step, in
        :attr:`outputs`, for metrics.

        Raises ArgumentError for a block that is no HybridBlock, or a loss that is no function.
        """
        if not isinstance(block, mx.gluon.HybridBlock):
            raise ArgumentError(
                f"block must be a HybridBlock, for memplan needs its Symbol; got "
                f"{type(block).__name__}. Derive it from HybridBlock (HybridSequential for "
                f"Sequential), with hybrid_forward for forward"
            )
        losses = loss if isinstance(loss, list | tuple) else [] if loss is None else [loss]
        if not all(map(callable, losses)) or (isinstance(loss, list | tuple) and not loss):
            raise ArgumentError(f"loss must be a function, a list of them, or None; got {loss!r}")
        if not runs_whole_steps(realisation):
            raise ArgumentError(
                f"realisation must be 'explicit' or 'packed' for TrainStep, got {realisation!r}"
            )
        self.block, self.loss = block, loss
        self.keep_outputs = keep_outputs
        #: The block's outputs in the last step, with ``keep_outputs``; else None.
        self.outputs: Arrays = None
        self._blocks = [block, *(fn for fn in losses if isinstance(fn, mx.gluon.Block))]
        self._options: dict[str, Any] = {
            "budget": budget,
            "strategy": strategy,
            "time_limit": time_limit,
            "costs": costs,
            "reserve": reserve,
            "realisation": realisation,
        }
        self._plans: dict[Any, tuple[Plan, BlockNetwork]] = {}
        self._bound: dict[Any, _Bound] = {}
        self._pools: dict[mx.Context, Pool] = {}
        self._graphs = cached_graphs(self._blocks)

    @property
    def plans(self) -> dict[tuple[tuple[int, ...], ...], Plan]:
        """The plans made so far, by the shapes of inputs and labels."""
        return {
            tuple(spec.shape for spec in leaves(key[0])): made[0]
            for key, made in self._plans.items()
        }

    def plan(self, x: Arrays, y: Arrays = None) -> Plan:
        """The plan for such inputs and labels: arrays, or shapes of float32 arrays."""
        batches = per_context(x, y)
        batch = (x, y) if batches is None else batches[0]
        self._forget_changed()
        params = self._parameters()
        specs = specs_of((as_inputs(batch[0]), batch[1]))
        return self._planned(specs, params, _context(params.values()))[0]

    def __call__(self, x: Arrays, y: Arrays = None, *, scale: float = 1.0) -> Arrays:
        """Run a training step on inputs ``x`` and labels ``y``; the loss, as the loss returns it.

        ``x`` is an array or a tuple of the block's inputs, ``y`` whatever the loss takes as
        labels. To train on several contexts, give lists with an entry for each of them, as
        ``split_and_load`` makes them; then the losses are such a list too. The gradients are
        those of ``scale`` times the loss; with AMP:
        ``with amp.scale_loss(1.0, trainer) as scale: loss = step(x, y, scale=scale)``.

        The block is in training mode, wherever this is called, as under ``autograd.record()``.

        Raises ArgumentError for arrays or parameters that cannot be used and under
        ``autograd.record(train_mode=False)``, TraceError for a network that cannot be planned, and
        whatever :func:`memplan.plan` raises.
        """
        if autograd.is_recording() and not autograd.is_training():
            raise ArgumentError(
                "TrainStep trains in training mode only; call it outside of "
                "autograd.record(train_mode=False). If layers are to compute as in inference, make "
                "BatchNorm with use_global_stats=True, and leave Dropout out"
            )
        batches = per_context(x, y)
        with autograd.pause():
            ran = [self._step((as_inputs(x), y), scale) for x, y in batches or [(x, y)]]
        losses, outputs = zip(*ran, strict=True)
        self.outputs = outputs[0] if batches is None else list(outputs)
        return losses[0] if batches is None else list(losses)

    def _step(self, batch: Arrays, scale: float) -> tuple[Arrays, Arrays]:
        specs = specs_of(batch)
        ctx = one_context(batch)
        self._forget_changed()
        bound = self._bound.get((specs, ctx))
        if bound is None or not bound.is_current():
            params = self._parameters()
            made, network = self._planned(specs, params, ctx, to_run=True)
            bound = self._bound[specs, ctx] = self._bind(made, network, params, ctx)
        return bound.step(batch, scale)

    def _bind(
        self, made: Plan, network: BlockNetwork, params: Mapping[str, Parameter], ctx: mx.Context
    ) -> _Bound:
        """Bind a plan; what was bound before goes if it is stale, or exceeds the budget beside."""
        need, pool = training_need(made), self._pools.setdefault(ctx, Pool())
        pool.allow(made)
        unfit = {place for (_, place), other in self._bound.items() if not other.is_current()}
        if not pool.admits(need):
            unfit.add(ctx)
        self._bound = {key: other for key, other in self._bound.items() if key[1] not in unfit}
        for place in unfit:
            self._pools[place].clear()
        others = [other for (_, place), other in self._bound.items() if place == ctx]
        bound = _Bound(made, network, params, ctx, pool, others)
        pool.add(need, bound.executor.pool, bound.executor.memory)
        bound.hand_over_gradients()  # the parameters hold those of what went
        for place in unfit:
            release(place)
        return bound

    def _parameters(self) -> dict[str, Parameter]:
        """The parameters of the block and the loss; ArgumentError for what cannot be trained."""
        found: dict[str, Parameter] = {}
        for block in self._blocks:
            for name, parameter in block.collect_params().items():
                if found.setdefault(name, parameter) is not parameter:
                    raise ArgumentError(f"two different parameters are named {name!r}; rename one")
                kinds = {parameter._stype}
                if parameter.grad_req != "null":
                    kinds.add(parameter._grad_stype)
                if kinds != {"default"}:
                    raise ArgumentError(
                        f"parameter {name!r} or its gradient is sparse, which TrainStep cannot "
                        f"train; create its layer without sparse_grad=True"
                    )
        return found

    def _planned(
        self,
        specs: Specs,
        params: Mapping[str, Parameter],
        ctx: mx.Context,
        *,
        to_run: bool = False,
    ) -> tuple[Plan, BlockNetwork]:
        """The plan for ``specs`` and the parameters as they are now, made if it is new.

        With ``to_run`` parameters that cannot be bound are an error before the search.
        """
        key = (specs, tuple(map(_state, params.values())), ctx.device_type)
        if key not in self._plans:
            network = compose(self.block, self.loss, specs, params, keep_outputs=self.keep_outputs)
            arguments = network.symbol.list_arguments()
            if to_run:
                for name in network.symbol.list_inputs():
                    if name in params:
                        _place(params[name], ctx)
            requests = {n: params[n].grad_req if n in params else "null" for n in arguments}
            shapes: dict[str, Any] = {
                n: shape for n, shape in network.shapes.items() if n in requests
            }
            made = plan(
                network.symbol,
                ctx=ctx,
                grad_req=requests,
                **self._options,
                **shapes,
            )
            self._plans[key] = (made, network)
        return self._plans[key]

    def _compose(self, specs: Specs, params: Mapping[str, Parameter]) -> BlockNetwork:
        return compose(self.block, self.loss, specs, params, keep_outputs=self.keep_outputs)

    def _forget_changed(self) -> None:
        """Drop the plans of what the block computes no longer, where MXNet forgot graphs of it."""
        if all(block._cached_op_args is arguments for block, arguments in self._graphs):
            return
        self._graphs = cached_graphs(self._blocks)
        params = self._parameters()
        for key, (_, network) in list(self._plans.items()):
            if not self._computes(network, key[0], params):
                del self._plans[key]
                for bound in self._bound.values():
                    bound.is_outdated |= bound.network is network

    def _computes(
        self, network: BlockNetwork, specs: Specs, params: Mapping[str, Parameter]
    ) -> bool:
        """Is ``network`` what the block is now for ``specs``?"""
        try:
            composed = self._compose(specs, params)
        except MemplanError:  # it no longer takes such inputs
            return False
        return (composed.structure, composed.form) == (network.structure, network.form)


class _Bound:
    """A plan bound to the parameters of a block on one context."""

    def __init__(
        self,
        made: Plan,
        network: BlockNetwork,
        params: Mapping[str, Parameter],
        ctx: mx.Context,
        pool: Pool,
        others: Sequence[_Bound],
    ) -> None:
        """Bind in the memory of ``pool``; inputs and labels in that of ``others``."""
        self.network, self.is_outdated = network, False
        trace = made.trace
        used = [params[name] for name in network.symbol.list_inputs() if name in params]
        _initialise(used, trace.shapes)
        self.places = [(p, _place(p, ctx), p.grad_req) for p in used]
        data = {p.name: p._data[i] for p, i, _ in self.places}
        states = set(network.symbol.list_auxiliary_states())
        self.executor: TrainExecutor = TrainExecutor(
            trace,
            made.schedule,
            ctx=ctx,
            args={
                **{name: array for name, array in data.items() if name not in states},
                **{name: array for name in network.shapes for array in _lent(name, trace, others)},
            },
            args_grad={p.name: p._grad[i] for p, i, request in self.places if request == "add"},
            aux_states={name: array for name, array in data.items() if name in states},
            pool=pool.executor,
            match_range=made.match_range,
            memory=pool.memory,
        )
        self.data = [data[p.name] for p in used]
        grads = self.executor.grad_dict
        self.grads = [grads.get(p.name) for p in used]
        self.scale = 1.0

    def is_current(self) -> bool:
        """Is the network that of the block, on its arrays, and are the same gradients wanted?"""
        return not self.is_outdated and all(
            p._data is not None
            and len(p._data) > place
            and p._data[place] is data
            and p.grad_req == request
            and (request != "add" or p._grad[place] is grad)
            for (p, place, request), data, grad in zip(
                self.places, self.data, self.grads, strict=True
            )
        )

    def step(self, batch: Arrays, scale: float) -> tuple[Arrays, Arrays]:
        """Run a step; its losses and kept outputs."""
        if scale != self.scale:
            for array in self.executor.head_grads.values():
                array[:] = scale
            self.scale = scale
        inputs, labels = batch
        values = {f"{INPUT}{i}": array for i, array in enumerate(leaves(inputs))}
        values |= {f"{LABEL}{i}": array for i, array in enumerate(leaves(labels))}
        known = self.executor.arg_dict
        self.hand_over_gradients()
        found = self.executor.forward(
            is_train=True, **{name: value for name, value in values.items() if name in known}
        )
        # The next step writes into the executor's arrays.
        losses, outputs = regrouped(self.network.form, iter([array.copy() for array in found]))
        return losses, outputs

    def hand_over_gradients(self) -> None:
        """Make the arrays in which the gradients will be those of the parameters."""
        for (p, place, request), data, grad in zip(self.places, self.data, self.grads, strict=True):
            if grad is None:
                continue
            if p._grad[place] is not grad:
                p._grad[place] = grad
                # Backward of autograd, if it is used beside this step, must write there too.
                autograd.mark_variables([data], [grad], [request])
            data._fresh_grad = True


def _lent(name: str, trace: Trace, others: Sequence[_Bound]) -> list[NDArray]:
    """An array for an input in the memory of one that is as large; none where there is none."""
    if name not in trace.shapes:
        return []
    known = [other.executor.arg_dict for other in others]
    views = [
        view(arrays[name], trace.shapes[name], trace.dtypes[name])
        for arrays in known
        if name in arrays
    ]
    return [array for array in views if array is not None][:1]


def _initialise(params: Sequence[Parameter], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Finish deferred initialisation, in the order of a hybridized block: the same numbers."""
    for parameter in params:
        if parameter._deferred_init:
            parameter.shape = shapes[parameter.name]
    for parameter in params:
        parameter._finish_deferred_init()


def _context(params: Iterable[Parameter]) -> mx.Context:
    """The first context of the parameters, initialised or to be; else the current one."""
    for parameter in params:
        if parameter._data is not None or parameter._deferred_init:
            return parameter.list_ctx()[0]
    return mx.context.current_context()


def _place(parameter: Parameter, ctx: mx.Context) -> int:
    """Which of the parameter's arrays is on ``ctx``."""
    if parameter._data is None and not parameter._deferred_init:
        raise ArgumentError(
            f"parameter {parameter.name!r} is not initialized; call block.initialize()"
        )
    contexts = parameter.list_ctx()
    if ctx not in contexts:
        raise ArgumentError(
            f"the batch is on {ctx}, parameter {parameter.name!r} on "
            f"{', '.join(map(str, contexts))}; load the batch there, or call "
            f"block.collect_params().reset_ctx({ctx})"
        )
    return int(contexts.index(ctx))


def _state(parameter: Parameter) -> tuple[Any, ...]:
    return parameter.name, parameter.grad_req, dtype_name(parameter.dtype)

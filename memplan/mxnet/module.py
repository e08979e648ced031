"""A Module that trains by plans: ``mx.mod.Module`` but for the executors that it trains with."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError, MemplanError
from memplan.mxnet.train.modules.arguments import check_by_place
from memplan.mxnet.train.modules.binder import Binder
from memplan.mxnet.train.modules.bound_before import BoundBefore
from memplan.mxnet.train.modules.contexts import contexts_of
from memplan.mxnet.train.modules.module_executor import Executor
from memplan.mxnet.train.modules.own_executors import warn_of_no_plan
from memplan.mxnet.train.modules.plans import Plans, planner_of_steps
from memplan.mxnet.train.modules.updated_by import UpdatedBy
from memplan.mxnet.train.updates import refusal_of_module, refusal_of_updater
from memplan.planning.plan import Plan
from memplan.planning.realisation import why_not_packed
from memplan.planning.shapes import ShapePlanner
from memplan.step.costs import Costs
from memplan.strategies import Strategy
from memplan.util.arguments import with_named_options

# What a bind sets.
_BOUND = (
    *("binded", "_exec_group", "_data_shapes", "_label_shapes", "_total_exec_bytes"),
    *("for_training", "inputs_need_grad", "_grad_req"),
    *("params_initialized", "_arg_params", "_aux_params", "_updated_by", "_plans"),
)


class Module(mx.mod.Module):  # type: ignore[misc]
    """Used like ``mx.mod.Module``; it trains within ``budget`` bytes on every device.

    ``budget``, ``strategy``, ``time_limit``, ``costs``, ``reserve`` and ``optimizer``, whose states
    are counted, are those of :func:`memplan.plan`, all other arguments those of ``mx.mod.Module``;
    ``realisation`` is "packed", "explicit" or "auto", the first of these that can train the
    network, or "updating". ``plan`` is a plan made before with one of them, for the shapes on the
    first device; others have its realisation, and its budget, reserve and optimizer where none are
    named. The network is planned when it is bound to train, and when input shapes are first seen in
    training: ``unseen`` says how these are planned ("plan", "nearest" or "unplanned", see
    docs/training.md).
    Plans are remembered. A budget given as a share is one of the step that is planned first. Steps
    of other shapes share its memory; where that would exceed the budget, they are bound in turn.

    ``forward(is_train=True)`` computes the gradients too, so the outputs must be losses or behind
    BlockGrad, and ``backward`` ignores ``out_grads``, as MXNet does there. Inference runs as MXNet
    does it, in the memory of the training step: it overwrites gradients that ``update`` has not
    used yet.

    With "updating" every training step updates the parameters, as soon as their gradients are
    complete, and :meth:`update` only notes that; there are no gradients to look at. Where that
    would not give the bits of ``update``, a warning says why, and the step is packed.

    ``bind`` and ``forward`` raise what :func:`memplan.plan` raises, and ArgumentError for a
    network that they cannot train. Where the plan is refused, or its search interrupted, all is as
    it was.
    """

    _data_shapes: Any
    _label_shapes: Any

    @with_named_options
    def __init__(
        self,
        symbol: mx.sym.Symbol,
        data_names: Sequence[str] | None = ("data",),
        label_names: Sequence[str] | None = ("softmax_label",),
        logger: Any = logging,
        context: mx.Context | Sequence[mx.Context] | None = None,
        work_load_list: Sequence[float] | None = None,
        fixed_param_names: Sequence[str] | None = None,
        state_names: Sequence[str] | None = None,
        group2ctxs: Any = None,
        compression_params: Mapping[str, Any] | None = None,
        *,
        budget: int | float | str | None = None,
        strategy: str | Strategy = "auto",
        time_limit: float = 60,
        costs: Costs | None = None,
        reserve: int | str = 0,
        optimizer: str | mx.optimizer.Optimizer | None = None,
        realisation: str = "auto",
        plan: Plan | None = None,
        unseen: str = "plan",
    ) -> None:
        _check_symbol(symbol)
        named = {"data_names": data_names, "label_names": label_names}
        check_by_place(symbol.list_arguments(), logger=logger, **named)
        super().__init__(
            symbol,
            data_names=data_names,
            label_names=label_names,
            logger=logger,
            context=contexts_of(context),
            work_load_list=work_load_list,
            fixed_param_names=fixed_param_names,
            state_names=state_names,
            group2ctxs=group2ctxs,
            compression_params=compression_params,
        )
        planner = planner_of_steps(
            budget=budget,
            strategy=strategy,
            time_limit=time_limit,
            costs=costs,
            reserve=reserve,
            optimizer=optimizer,
            realisation=realisation,
            unseen=unseen,
            given=plan,
            contexts=self._context,
        )
        #: By what the last training step has updated the parameters, until :meth:`update`.
        self._updated_by = UpdatedBy()
        #: That it trains without a plan.
        self._is_told = False
        self._plan_by(planner, plan)

    def _plan_by(self, planner: ShapePlanner, given: Plan | None, **when: bool) -> None:
        self._plans = Plans(self.symbol, planner, given, **when)
        self._plans.released = weakref.WeakMethod(self._collect)
        self._plans.updated = weakref.WeakMethod(self._begin_update)
        if self._plans.update_within:
            reason = why_not_packed(self._context) if given is None else None
            if len(self._context) > 1:
                reason = "gradients of several contexts are summed up first"
            if reason is not None:
                self._plans.update_behind(reason, self._context)

    def _collect(self) -> None:
        """Let the group have the arrays of the executors as they are now."""
        if self.binded:
            self._exec_group._collect_arrays()

    @classmethod
    def load(
        cls, prefix: str, epoch: int, load_optimizer_states: bool = False, **options: Any
    ) -> Module:
        """The module that ``save_checkpoint`` saved; ``options`` are those of the class."""
        symbol, arguments, states = mx.model.load_checkpoint(prefix, epoch)
        module = cls(symbol, **options)
        module._arg_params, module._aux_params = arguments, states
        module.params_initialized = True
        if load_optimizer_states:
            module._preload_opt_states = f"{prefix}-{epoch:04d}.states"
        return module

    @property
    def plan(self) -> Plan | None:
        """The plan for the shapes that it was bound to, on the first device.

        None where it is not bound to train.
        """
        if not self.binded:
            return None
        first = (self._exec_group._default_execs or self._exec_group.execs)[0]
        return first.plan if isinstance(first, Executor) else None

    def bind(self, *arguments: Any, **options: Any) -> None:
        """Bind as ``mx.mod.Module`` does; to train, plan the step first.

        Beside a ``shared_module`` of this class the plan begins with what that one has found. So it
        does with what was found for the network that a script has replaced (``module._symbol``).
        """
        symbol, before = self.symbol, BoundBefore(self, _BOUND, self._plans.kept())
        if not self.binded or options.get("force_rebind", any(arguments[4:5])):
            self._plans = self._plans.of_network(symbol)
        shared = options.get("shared_module", next(iter(arguments[5:6]), None))
        if isinstance(shared, Module):
            self._plans.begin_with(shared._plans)
        self._plans.when_found.append(before.let_go)
        self._symbol = Binder(symbol, self._plans, self._context)
        try:
            super().bind(*arguments, **options)
        except BaseException:
            before.bring_back()
            raise
        finally:
            self._symbol = symbol
            self._plans.when_found.clear()
        self._update_within()

    def _reset_bind(self) -> None:
        self._tell_of_update()  # what is bound anew knows of no step
        super()._reset_bind()
        self._updated_by = UpdatedBy()

    def reshape(self, data_shapes: Any, label_shapes: Any = None) -> None:
        """Go on with inputs of other shapes."""
        with self._back_if_refused():
            super().reshape(data_shapes, label_shapes)

    @contextlib.contextmanager
    def _back_if_refused(self) -> Iterator[None]:
        """Within it shapes may change, and are as they were where a step with them is refused."""
        shapes, labels = self._data_shapes, self._label_shapes
        kept = [(executor, executor.operators) for executor in self._planned()]
        try:
            yield
        except (MemplanError, KeyboardInterrupt):
            if self._data_shapes is not shapes:
                self._data_shapes, self._label_shapes = shapes, labels
                self._exec_group.bind_exec(shapes, labels, reshape=True)
                for executor, operators in kept:
                    executor.operators = operators
            raise

    def forward(self, data_batch: Any, is_train: bool | None = None) -> None:
        """Run a training step, gradients included, or inference."""
        self._tell_of_update()
        trains = self.for_training if is_train is None else is_train
        if trains:
            if self.binded and not (self._is_told or self._planned()):
                self._is_told = warn_of_no_plan(self._exec_group.execs)
            self._update_within()  # whatever a script has put in its place
        nbound = self._plans.nbound
        with self._back_if_refused():
            super().forward(data_batch, is_train)
        if self._plans.nbound != nbound:
            # Shapes seen for the first time: there are gradients where there were none.
            self._collect()

    def _planned(self) -> list[Executor]:
        """Its executors that train by plans; none where all are MXNet's."""
        executors = self._exec_group.execs if self.binded else ()
        return [executor for executor in executors if isinstance(executor, Executor)]

    @property
    def _step_updates(self) -> bool:
        """Do its training steps update the parameters?"""
        return self._plans.update_within and bool(self._planned())

    def get_params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments and states, by name."""
        self._tell_of_update()
        parameters: tuple[dict[str, Any], dict[str, Any]] = super().get_params()
        return parameters

    def save_optimizer_states(self, fname: str) -> None:
        """Save the states of the optimizer to a file."""
        self._tell_of_update()
        super().save_optimizer_states(fname)

    def _tell_of_update(self) -> None:
        """Warn where MXNet's parameters and states would be those of before the last step."""
        if self._updated_by.is_due:
            warnings.warn(
                "update() was not called after the last training step, which has updated the "
                "parameters already (realisation='updating'); call update() right after the step. "
                "forward(batch) without is_train trains, too: evaluate by forward(batch, "
                "is_train=False). If a script leaves updates out, take realisation='packed'",
                stacklevel=3,
            )

    def update(self) -> None:
        """Update the parameters by the gradients of the last training step, if it has not."""
        if not self._step_updates:
            self._check_gradients()
            super().update()
        else:
            self._updated_by.check(self._updater)
        self._updated_by.end()

    def _begin_update(self) -> None:
        """A training step, of a script's call of the executors, too, has updated parameters."""
        group = self._exec_group
        pairs = zip(group.param_names, group.param_arrays, strict=True)
        weights = [array for name, [array] in pairs if group.grad_req[name] != "null"]
        self._params_dirty = True
        self._updated_by.begin(self._updater, weights, turned=self._plans.updates.turned)

    def init_optimizer(self, *arguments: Any, **options: Any) -> None:
        """Install an optimizer as ``mx.mod.Module`` does; it may have to update behind the step."""
        super().init_optimizer(*arguments, **options)
        self._update_within()

    def borrow_optimizer(self, shared_module: mx.mod.Module) -> None:
        """Take the optimizer of another module."""
        super().borrow_optimizer(shared_module)
        self._update_within()

    def _update_within(self) -> None:
        """Let the optimizer update within the step, if it can: when there are both."""
        if not (self._step_updates and self.optimizer_initialized):
            return
        if self._kvstore is not None:
            reason: str | None = "a kvstore sums up the gradients, or updates the parameters"
        else:
            reason = refusal_of_module(self) or refusal_of_updater(self._updater)
        if reason is None:
            names = self._exec_group.param_names
            self._plans.updates.indices = {name: index for index, name in enumerate(names)}
            self._plans.updates.updater = self._updater
            return
        executors = self._planned()
        # Others may only infer, and an output without a loss, or the budget, may refuse their step.
        trained = [executor for executor in executors if executor.plan is not None]
        self._plans.update_behind(reason)
        for executor in executors:
            executor.clear_device()
        for executor in trained:
            executor.train()
        self._collect()

    def get_input_grads(self, merge_multi_context: bool = True) -> Any:
        """The gradients of the inputs, computed in the last training step."""
        self._check_gradients()
        return super().get_input_grads(merge_multi_context)

    def _check_gradients(self) -> None:
        for executor in self._planned():
            executor.check_gradients()


def _check_symbol(symbol: Any) -> None:
    """ArgumentError for what is no Symbol."""
    if not isinstance(symbol, mx.sym.Symbol):
        raise ArgumentError(
            f"Module trains a Symbol, got {type(symbol).__name__}; for a Gluon block there is "
            f"memplan.mxnet.gluon.TrainStep"
        )

"""A BucketingModule that trains by plans, which share their search and their memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.errors import MemplanError
from memplan.mxnet.module import Module
from memplan.mxnet.train.modules.arguments import check_by_place
from memplan.mxnet.train.modules.bound_before import BoundBefore
from memplan.mxnet.train.modules.contexts import contexts_of
from memplan.mxnet.train.modules.plans import planner_of_steps
from memplan.mxnet.train.updates import refusal_of_module
from memplan.planning.plan import Plan
from memplan.step.costs import Costs
from memplan.strategies import Strategy
from memplan.util.arguments import with_named_options

SymGen = Callable[[Any], tuple[mx.sym.Symbol, Sequence[str], Sequence[str]]]


# What a bind sets.
_BOUND = (
    *("binded", "_buckets", "_curr_module", "_curr_bucket_key"),
    *("for_training", "inputs_need_grad", "_grad_req"),
)


class BucketingModule(mx.mod.BucketingModule):  # type: ignore[misc]
    """Used like ``mx.mod.BucketingModule``; it trains every bucket within ``budget`` bytes.

    The other options are those of :class:`memplan.mxnet.Module`; ``plan`` is one for the default
    bucket. That is planned first, which takes up to ``time_limit`` seconds, unless its outputs are
    no losses. Further buckets are planned when they are first trained, with a tenth of the work:
    they begin with a schedule that is known (``unseen`` says what else may be done:
    docs/training.md).

    All buckets run in the memory of the largest: packed in one array, which is the better choice
    here; explicit in the blocks of MXNet's executors, which are bound in turn where one lacks
    blocks that the budget has no room for. As in :class:`~memplan.mxnet.Module`, call ``update``
    right after the training step.
    """

    binded: bool
    _curr_module: Any
    _curr_bucket_key: Any

    @with_named_options
    def __init__(
        self,
        sym_gen: SymGen,
        default_bucket_key: Any = None,
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
        check_by_place(logger=logger)
        self._of_each: dict[str, Any] = {
            "logger": logger,
            "context": contexts_of(context),
            "work_load_list": work_load_list,
            "fixed_param_names": fixed_param_names,
            "state_names": state_names,
            "group2ctxs": group2ctxs,
            "compression_params": compression_params,
        }
        super().__init__(sym_gen, default_bucket_key=default_bucket_key, **self._of_each)
        self._given = plan
        self._planner = planner_of_steps(
            budget=budget,
            strategy=strategy,
            time_limit=time_limit,
            costs=costs,
            reserve=reserve,
            optimizer=optimizer,
            realisation=realisation,
            unseen=unseen,
            given=plan,
            contexts=self._of_each["context"],
        )

    @classmethod
    def load(
        cls,
        prefix: str,
        epoch: int,
        sym_gen: SymGen,
        default_bucket_key: Any,
        **options: Any,
    ) -> BucketingModule:
        """The module that ``save_checkpoint`` saved; ``options`` are those of the class."""
        keys = [int(key) for key in mx.nd.load(f"{prefix}.buckets")[0].asnumpy()]
        symbols = {key: mx.sym.load(f"{prefix}-{key}-symbol.json") for key in keys}
        arguments, states = mx.model.load_params(prefix, epoch)
        return cls.load_dict(symbols, sym_gen, default_bucket_key, arguments, states, **options)

    @classmethod
    def load_dict(
        cls,
        sym_dict: Mapping[Any, mx.sym.Symbol],
        sym_gen: SymGen,
        default_bucket_key: Any,
        arg_params: Mapping[str, Any],
        aux_params: Mapping[str, Any],
        **options: Any,
    ) -> BucketingModule:
        """A module of these symbols and parameters; ``options`` are those of the class."""
        module = cls(sym_gen, default_bucket_key, **options)
        for key, symbol in sym_dict.items():
            module._add(key, symbol)
        default = module._buckets[default_bucket_key]
        default._arg_params, default._aux_params = dict(arg_params), dict(aux_params)
        default.params_initialized = module.params_initialized = True
        module._curr_module = default
        return module

    @property
    def plans(self) -> dict[Any, Plan]:
        """The plans of the buckets that are bound to train, on the first device."""
        plans = {key: module.plan for key, module in self._buckets.items()}
        return {key: plan for key, plan in plans.items() if plan is not None}

    def bind(self, *arguments: Any, **options: Any) -> None:
        """Bind as ``mx.mod.BucketingModule`` does; to train, plan the default bucket first.

        Where the plan is refused, or its search interrupted, all is as it was.
        """
        if self._default_bucket_key not in self._buckets:
            self._add(self._default_bucket_key)
        self._before = BoundBefore(self, _BOUND)
        try:
            super().bind(*arguments, **options)
        except BaseException:
            if not self._before.bring_back():
                self.binded = False
            raise
        finally:
            del self._before

    def forward(self, data_batch: Any, is_train: bool | None = None) -> None:
        """Run a training step, gradients included, or inference, of the bucket of the batch."""
        before = self._curr_module, self._curr_bucket_key
        try:
            super().forward(data_batch, is_train)
        except (MemplanError, KeyboardInterrupt):
            self._curr_module, self._curr_bucket_key = before
            raise

    def switch_bucket(self, bucket_key: Any, data_shapes: Any, label_shapes: Any = None) -> None:
        """Make this bucket the current one; it is planned when it is first trained."""
        if bucket_key in self._buckets:
            super().switch_bucket(bucket_key, data_shapes, label_shapes)
            return
        self._add(bucket_key)
        try:
            super().switch_bucket(bucket_key, data_shapes, label_shapes)
        except BaseException:
            del self._buckets[bucket_key]
            raise
        if self._monitor is not None:
            self._curr_module.install_monitor(self._monitor)

    def _reset_bind(self) -> None:
        super()._reset_bind()
        self._add(self._default_bucket_key)
        plans = self._buckets[self._default_bucket_key]._plans
        plans.when_found.append(self._before.let_go)

    def _add(self, key: Any, symbol: mx.sym.Symbol | None = None) -> None:
        """A module for a bucket, not bound yet."""
        generated, data_names, label_names = self._call_sym_gen(key)
        self._buckets[key] = Module(
            generated if symbol is None else symbol, data_names, label_names, **self._of_each
        )
        # Others wait for their first training step: a bucket may only be evaluated, and ``prepare``
        # binds the next one while the outputs of the last step are still to be read. So does the
        # default one where it has no loss: that of Keras is there for predictions.
        is_default = key == self._default_bucket_key
        given = self._given if is_default else None
        when = {"at_once": is_default, "may_only_infer": True}
        self._buckets[key]._plan_by(self._planner, given, **when)
        plans, reason = self._buckets[key]._plans, refusal_of_module(self)
        if plans.update_within and reason is not None:
            plans.update_behind(reason)

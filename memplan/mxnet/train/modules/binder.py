"""What stands in for a network while a Module binds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.trace.environment import match_range
from memplan.mxnet.train.modules.module_executor import Executor, Lent
from memplan.mxnet.train.modules.plans import Plans, Request


class Binder:
    """Stands in for a network while Module binds it: ``simple_bind`` gives planned executors."""

    def __init__(self, net: mx.sym.Symbol, plans: Plans, contexts: Sequence[mx.Context]) -> None:
        self._net, self._plans, self._contexts = net, plans, contexts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def __getitem__(self, index: int) -> mx.sym.Symbol:
        return self._net[index]

    def simple_bind(
        self,
        ctx: mx.Context,
        grad_req: Mapping[str, str],
        type_dict: Mapping[str, Any],
        shared_arg_names: Sequence[str],
        shared_exec: Any,
        group2ctx: Any,
        shared_buffer: Any,
        **shapes: tuple[int, ...],
    ) -> Any:
        """An executor that trains by a plan; MXNet's own if no gradient is wanted."""
        arguments = self._net.list_arguments()
        if all(grad_req[name] == "null" for name in arguments):
            self._plans.found()
            with match_range(None):
                return self._net.simple_bind(
                    ctx=ctx,
                    grad_req=grad_req,
                    type_dict=type_dict,
                    shared_arg_names=shared_arg_names,
                    # One that trains lends its handle, as to a Module of MXNet's own: in the memory
                    # of a step, inference would overwrite gradients that wait for their update.
                    shared_exec=shared_exec,
                    group2ctx=group2ctx,
                    shared_buffer=shared_buffer,
                    **shapes,
                )
        if group2ctx:
            raise ArgumentError("group2ctxs: a plan trains on one device; use mx.mod.Module")
        request = Request(
            ctx,
            {name: tuple(shapes[name]) for name in arguments if name in shapes},
            {name: type_dict[name] for name in arguments if name in type_dict},
            {name: grad_req[name] for name in arguments},
        )
        if self._plans.update_within:
            inputs = [name for name in arguments if name not in shared_arg_names]  # and states
            if any(request.grad_req[name] != "null" for name in inputs):
                reason = "gradients of inputs or states are wanted, which stay to its end"
                self._plans.update_behind(reason)
            elif "add" in request.grad_req.values():
                self._plans.update_behind("gradients are added up over steps (grad_req='add')")
        self._plans.check_contexts(self._contexts)  # of which each would be planned before the next
        self._plans.find_at_once(request)
        self._plans.found()
        lent = Lent([name for name in arguments if name not in shared_arg_names], shared_buffer)
        executor = Executor(self._net, self._plans, request, shared_exec, shared_arg_names, lent)
        if self._plans.at_once:
            executor.train()
        return executor

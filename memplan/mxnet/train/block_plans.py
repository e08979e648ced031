"""The plans of the steps of a block, and the networks that they are for: made when first asked."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.trace.arguments import UnknownShapeError
from memplan.mxnet.train.arrays.nesting import Specs, leaves
from memplan.mxnet.train.blocks.block_changes import BlockChanges
from memplan.mxnet.train.blocks.block_network import BlockNetwork, compose
from memplan.mxnet.train.blocks.block_parameters import check_trained, trainable
from memplan.mxnet.train.blocks.cached_graphs import KeptGraphs
from memplan.mxnet.train.blocks.called_with_symbols import Composition
from memplan.mxnet.train.blocks.computed import Computed, state_of
from memplan.mxnet.train.blocks.loss_calls import LossCalls
from memplan.mxnet.train.bound_step import BoundStep
from memplan.mxnet.train.parameters_of_step import (
    arguments_of,
    check_inferred,
    contexts_of_params,
    gradient_requests,
    place_of,
)
from memplan.mxnet.train.step_trainer import StepTrainer
from memplan.planning.plan import Plan
from memplan.planning.realisation import suited
from memplan.planning.shapes import ShapePlanner

Parameter = Any
Params = Mapping[str, Parameter]

# Specs of inputs and labels; does the step run in halves?
Kind = tuple[Specs, bool]


class BlockPlans:
    """The plans of steps of the first of ``blocks``, whose others are losses, with this ``loss``.

    They are made by ``planner``, and for updates by ``trainer`` within the step where it can.
    """

    def __init__(
        self,
        blocks: Sequence[mx.gluon.HybridBlock],
        loss: Any,
        planner: ShapePlanner,
        trainer: StepTrainer,
        *,
        keep_outputs: bool,
    ) -> None:
        self._block, self._loss, self._keep_outputs = blocks[0], loss, keep_outputs
        self._planner, self._trainer = planner, trainer
        self._suited = functools.cache(functools.partial(suited, planner.realisation))  # which logs
        #: With the network that each is for.
        self.made: dict[Any, tuple[Plan, BlockNetwork]] = {}
        self.graphs = KeptGraphs()
        #: Whether the block may compute something else than in the last step.
        self.changes = BlockChanges(blocks, loss, self.graphs.is_kept)
        self._loss_calls = LossCalls(loss, self.changes)

    def by_shapes(self) -> dict[tuple[tuple[int, ...], ...], Plan]:
        """The plan last made for each of these shapes of inputs and labels."""
        return {
            tuple(spec.shape for spec in leaves(key[0][0])): pair[0]
            for key, pair in self.made.items()
        }

    def params(self) -> Params:
        """The parameters as they are now, by name; ArgumentError for some that none can train."""
        return trainable(self.changes.parameters())

    def find(
        self,
        kind: Kind,
        params: Params,
        ctx: mx.Context,
        network: BlockNetwork | None,
        *,
        to_run: bool = False,
    ) -> tuple[Plan, BlockNetwork]:
        """The plan for this ``kind`` and the parameters as they are now, made if it is new.

        ``network`` is what the block computes, if it was asked. With ``to_run`` parameters that
        cannot be bound are an error before the search.
        """
        realisation = self._suited(frozenset({ctx, *contexts_of_params(params.values())}))
        asked = (kind, state_of(params), ctx.device_type, realisation)
        kept = [known for key, (_, known) in self.made.items() if key[:-1] == asked]
        network = kept[0] if kept else network or self._compose(params, to_run, kind)
        # Of what the network does not read, the trainer may lack or have anything.
        parameters = arguments_of(network, params)
        within = self._trainer.updates_within(parameters, kind[1])
        key = (*asked, within)
        if key not in self.made:
            if to_run:
                for name in filter(params.__contains__, network.symbol.list_inputs()):
                    place_of(params[name], ctx)
            requests = gradient_requests(network.symbol.list_arguments(), params)
            shapes = {n: shape for n, shape in network.shapes.items() if n in requests}
            check_trained(parameters, self._block, is_planned=self.graphs.of_calls)
            request = {"shapes": shapes, "ctx": ctx, "grad_req": requests}
            planned = functools.partial(self._planner.plan, network.symbol, **request)
            try:
                self.made[key] = self._trainer.plan(planned, realisation, within), network
            except UnknownShapeError as error:
                check_inferred(error.names, params)
                raise
        return self.made[key]

    def _compose(
        self, params: Params, to_run: bool, kind: Kind, *, known: BlockNetwork | None = None
    ) -> BlockNetwork:
        specs, in_halves = kind
        run, call_loss = self._loss_calls.of_network(kind)
        calls = functools.partial(self.changes.calls, kind, are_known=run is not None)
        task = Composition(
            self._block,
            self._loss,
            by_graphs=functools.partial(self.graphs.in_network, calls, are_made=to_run),
            keep_outputs=self._keep_outputs and not in_halves,
            in_halves=in_halves,
            has_been_called=self.graphs.of_calls,
            run=run,
            call_loss=call_loss,
        )
        with self.changes.as_in_graphs():
            return compose(task, specs, params, known=known)

    def forget_changed(
        self, kind: Kind, bound_steps: Iterable[BoundStep], *, to_run: bool
    ) -> BlockNetwork | None:
        """Drop plans of what is computed no longer; the network of ``kind``, if it was asked.

        Of ``bound_steps`` those that are bound to such plans are outdated then.
        """
        are_possible = self.changes.are_possible(kind, {key[0] for key in self.made})
        are_possible |= self.changes.are_unseen() or (to_run and self.changes.is_graph_new(kind))
        if not self._loss_calls.are_other(kind, are_possible) and not are_possible:
            return None
        self.changes.begin(kind)
        params = self.params()
        networks = {(kind, *k[1:]): made[1] for k, made in self.made.items() if k[0] == kind}
        found = Computed(functools.partial(self._compose, params, to_run), state_of(params))
        gone = [self.made.pop(key)[1] for key in found.gone(networks)]
        for bound in bound_steps:
            bound.is_outdated |= not bound.is_of(params) or any(bound.network is n for n in gone)
        self.changes.end(kind, self._block.name, are_found=bool(gone))
        return found.networks.get(kind)

"""The plans of a network for the steps that a Module is asked to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mxnet as mx
import numpy as np

from memplan.errors import ArgumentError, TraceError
from memplan.mxnet.realise.bind import PLACED
from memplan.mxnet.realise.generators import draws
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.arguments import infer_arguments
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.flags import without_flags
from memplan.mxnet.trace.nnvm import from_json
from memplan.mxnet.train.pool import Need, inference_need
from memplan.mxnet.train.updates import OptimizerUpdates, warn_behind
from memplan.planning.plan import Plan
from memplan.planning.realisation import (
    AUTO,
    UPDATING,
    load,
    runs_whole_steps,
    suited,
    trace_by,
    usable,
)
from memplan.planning.shapes import ShapePlanner
from memplan.util.nbytes import format_nbytes, parse_budget
from memplan.util.numbers import shown

# Of nodes that are no operators, what they are called in messages.
_KINDS = {"null": "variable"}


@dataclass(frozen=True)
class Request:
    """A step to train: on which device, with which inputs, for which gradients."""

    ctx: mx.Context
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, Any]
    grad_req: Mapping[str, str]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a plan depends on."""
        dtypes = {name: np.dtype(dtype).name for name, dtype in self.dtypes.items()}
        mappings = (self.shapes, dtypes, self.grad_req)
        return (self.ctx.device_type, *(tuple(sorted(mapping.items())) for mapping in mappings))


def planner_of_steps(
    *,
    realisation: str,
    contexts: Sequence[mx.Context],
    given: Plan | None,
    **options: Any,
) -> ShapePlanner:
    """The planner of a Module on these ``contexts``; ``options`` are those of ShapePlanner.

    Raises ArgumentError for a plan ``given`` that is none, or is run in another way than
    ``realisation`` asks for, and for a realisation that does not run whole steps.
    """
    if given is not None and not isinstance(given, Plan):
        raise ArgumentError(
            f"plan must be one that memplan.plan made or load_plan has read, got {shown(given)}"
        )
    asked = usable(realisation)
    name = suited(realisation, contexts) if given is None else given.realisation
    for each in (name, realisation):
        if not runs_whole_steps(each):
            raise ArgumentError(
                f"Module trains by plans made with realisation='explicit' or 'packed', not "
                f"{each!r}; train the symbol of a mirror plan with mx.mod.Module"
            )
    if given is not None and asked not in (None, name):
        raise ArgumentError(
            f"the given plan was made with realisation={name!r}, and cannot be run as {asked!r}"
            f"{_because_of_gradients(name, asked)}; leave realisation out, or give a plan made "
            f"with realisation={asked!r}"
        )
    return ShapePlanner(realisation=name, **options)


def _because_of_gradients(name: str, asked: str) -> str:
    """Where one of two realisations updates within the step: why a plan of one is not the other."""
    if asked == UPDATING:
        return ", as it keeps the gradients for update()"
    return ", as it uses up the gradients within the step" if name == UPDATING else ""


class LossError(ArgumentError):
    """A step cannot be trained because an output is no loss; the message names the output."""


class Plans:
    """The plans of one network, made by ``planner`` when first asked for, or ``given``.

    ``nbound`` counts the executors that were bound to them, ``released`` refers to what is to be
    called when one has freed its memory, and ``updated`` to what is when a step has updated the
    parameters; ``when_found`` is called when there is a plan to bind an executor to, before that
    takes memory. With ``at_once`` a step is bound with the module, not
    when it is first run, unless it has no losses and ``may_only_infer`` allows that.
    """

    def __init__(
        self,
        net: mx.sym.Symbol,
        planner: ShapePlanner,
        given: Plan | None = None,
        *,
        at_once: bool = True,
        may_only_infer: bool = False,
    ) -> None:
        self._net, self._planner, self._given = net, planner, given
        self.at_once, self._may_only_infer = at_once, may_only_infer
        #: Are there Custom ops, in loops or branches, too?
        self.has_user_code = '"Custom"' in symbol_json.text_of(net)
        self.released: Callable[[], Callable[[], None] | None] = lambda: None
        self.updated: Callable[[], Callable[[], None] | None] = lambda: None
        self.when_found: list[Callable[[], None]] = []
        #: By what realisation plans are asked for, whatever others of this planner ask for, and by
        #: what the last one was made.
        self._asked = self.realisation = planner.realisation
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self._inference: dict[tuple[Any, ...], Need] = {}
        self._traces: dict[tuple[Any, ...], Trace] = {}
        self.nbound = 0
        #: What updates the parameters within steps, where the realisation is "updating".
        self.updates = OptimizerUpdates()

    def begin_with(self, other: Plans) -> None:
        """Take the plans of ``other``, if it was asked for the same, and begin further ones there.

        So a script that makes a Module anew for every shape does not search anew for each.
        """
        if self._given is None and self._planner.is_like(other._planner):
            self._planner.begin_with(other._planner)
            is_same = self._net.tojson() == other._net.tojson()
            if is_same and self.update_within == other.update_within:
                self.plans = other.plans | self.plans

    def of_network(self, net: mx.sym.Symbol) -> Plans:
        """These if they are of ``net``; else others, asked for the same, which begin with these."""
        if net is self._net:
            return self
        when = {"at_once": self.at_once, "may_only_infer": self._may_only_infer}
        plans = Plans(net, self._planner, self._given, **when)
        plans.released, plans.updated = self.released, self.updated
        plans.begin_with(self)
        return plans

    def kept(self) -> Callable[[], None]:
        """What makes the plans those that there are now, and how others are made."""
        asked, realisation, of_planner = self._asked, self.realisation, self._planner.realisation
        plans = dict(self.plans)

        def bring_back() -> None:
            self._asked, self.realisation = asked, realisation
            self._planner.realisation = of_planner
            self.plans = plans

        return bring_back

    @cached_property
    def draws_in_inference(self) -> bool:
        """Does inference draw random numbers?"""
        nodes, _ = from_json(symbol_json.parse(self._net))
        return draws(nodes, in_training=False)

    def found(self) -> None:
        """An executor is to be bound, by a plan that was found if it trains at once."""
        for function in self.when_found:
            function()

    @property
    def update_within(self) -> bool:
        """Are the parameters updated within the steps?"""
        return self.realisation == UPDATING

    def note_step(self) -> None:
        """A training step has run."""
        updated = self.updated()
        if self.update_within and updated is not None:
            updated()

    def update_behind(
        self, reason: str, contexts: Iterable[mx.Context] = (), *, of_network: bool = False
    ) -> None:
        """Plan anew for steps whose gradients wait for the update; a warning says why.

        They are packed, unless that is not possible on ``contexts``: then the log says so, too.
        So are those of networks that begin to be planned by the same planner, unless the reason is
        one ``of_network``. ArgumentError if the user gave a plan.
        """
        if self._given is not None:
            raise ArgumentError(
                f"the given plan updates the parameters within the step, but {reason}; give one "
                f"made with realisation='packed' or 'explicit'"
            )
        warn_behind(reason)
        name = suited(AUTO, contexts)
        self._asked = self.realisation = "packed" if name == AUTO else name
        if not of_network:
            self._planner.realisation = self._asked
        self.plans.clear()

    def check_contexts(self, contexts: Iterable[mx.Context]) -> None:
        """ArgumentError where steps of this realisation cannot run on one of ``contexts``."""
        for ctx in contexts if self.realisation != AUTO else ():
            load(self.realisation).check_context(ctx)

    def find(self, request: Request) -> Plan:
        """The plan for ``request``."""
        if request.key not in self.plans:
            if self._given is not None and not self.plans:
                self.plans[request.key] = self._checked(self._given, request)
                self._planner.adopt_given(self._given, request.ctx)
            else:
                self.plans[request.key] = self._planned(request)
            self.realisation = self.plans[request.key].realisation
        return self.plans[request.key]

    def find_at_once(self, request: Request) -> None:
        """Find the plan for ``request`` if its step is bound ``at_once``.

        A network without losses that may be there for inference only is bound nonetheless: its step
        is refused when it is first run.
        """
        if not self.at_once:
            return
        try:
            self.find(request)
        except LossError:
            if not self._may_only_infer:
                raise
            self.at_once = False

    def _planned(self, request: Request) -> Plan:
        """A plan for ``request``, of updates behind the step where they cannot be within."""
        try:
            return self._planner.plan(
                self._net,
                self._asked,
                shapes=request.shapes,
                check=_check_losses,
                ctx=request.ctx,
                type_dict=request.dtypes,
                grad_req=request.grad_req,
            )
        except TraceError as error:
            if not self.update_within or self.plans:
                raise
            reason = str(error)
        self._traced("packed", request)  # what refuses these, too, is not due to the updates
        self.update_behind(reason, of_network=True)
        return self._planned(request)

    def _traced(self, realisation: str, request: Request) -> Trace:
        _, traced = trace_by(
            realisation,
            self._net,
            shapes=request.shapes,
            type_dict=request.dtypes,
            grad_req=request.grad_req,
            device_type=request.ctx.device_type,
        )
        return traced

    def trace_of(self, request: Request) -> Trace | None:
        """The step of ``request``, planned or not; None where it cannot be traced."""
        try:
            return self._trace_of(request)
        except TraceError:
            return None

    def _trace_of(self, request: Request) -> Trace:
        if request.key in self.plans:
            return self.plans[request.key].trace
        if request.key not in self._traces:
            self._traces[request.key] = self._traced(self.realisation, request)
        return self._traces[request.key]

    def inference_need(self, request: Request) -> Need:
        """What inference with the inputs of ``request`` runs in."""
        if request.key not in self._inference:
            traced = self._trace_of(request)
            self._inference[request.key] = inference_need(traced, request.ctx.device_type)
        return self._inference[request.key]

    def _checked(self, plan: Plan, request: Request) -> Plan:
        """``plan``, which was made for ``request``; ArgumentError if it was not."""
        net = without_flags(self._net)
        shapes, dtypes = infer_arguments(net, request.shapes, request.dtypes)
        pairs = {
            "another network": (net.tojson(), plan.trace.symbol.tojson()),
            "other shapes": (shapes, plan.trace.shapes),
            "other dtypes": (dtypes, plan.trace.dtypes),
            "another grad_req": (request.grad_req, plan.trace.grad_req),
        }
        for what, (request_value, value) in pairs.items():
            if request_value != value:
                differs = _other_node if what == "another network" else _difference
                where = differs(request_value, value)
                if what == "other dtypes":
                    named = {name: np.dtype(dtype).name for name, dtype in request.dtypes.items()}
                    where += f"; make it with type_dict={named}"
                raise ArgumentError(f"the given plan was made for {what}: {where}")
        budget_nbytes = parse_budget(self._planner.budget, plan.unplanned.total_nbytes)
        if budget_nbytes is not None and plan.total_nbytes > budget_nbytes:
            raise ArgumentError(
                f"the given plan takes {format_nbytes(plan.total_nbytes)}, more than the budget of "
                f"{format_nbytes(budget_nbytes)}; give one that fits, or no budget"
            )
        _check_losses(plan.trace)
        return plan


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    name = next(n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n))
    return f"{name!r} is {ours.get(name)} here, {theirs.get(name)} there"


def _other_node(ours: str, theirs: str) -> str:
    """In what two networks, as MXNet writes them, differ first."""
    here, there = (symbol_json.parse_text(text)["nodes"] for text in (ours, theirs))
    if any(PLACED.items() <= node.get("attrs", {}).items() for node in here):
        return "this one is a whole step, as plan.symbol is; give the network itself"
    pairs = (pair for pair in zip(here, there, strict=False) if pair[0] != pair[1])
    node, other = next(pairs, (None, None))
    if node is None or other is None:
        return f"{len(here)} variables and ops here, {len(there)} there, or others are outputs"
    kind, other_kind = (_KINDS.get(each["op"], each["op"]) for each in (node, other))
    if kind != other_kind:
        return f"{node['name']!r} ({kind}) here, {other['name']!r} ({other_kind}) there"
    if node["name"] == other["name"]:
        parts, other_parts = _parts(node, here), _parts(other, there)
        where = f"{node['name']!r} ({kind})"
        if parts == other_parts and "subgraphs" in node:
            return f"the loop or branch {where} runs another one here than there"
        if parts == other_parts:
            return f"{where} reads other ops here than there, which have the same names"
        return f"of {where} {_difference(parts, other_parts)}"
    return (
        f"{node['name']!r} here is {other['name']!r} there. If MXNet has counted these names, "
        f"build the network under mx.name.NameManager(), which counts anew; or name it yourself"
    )


def _parts(node: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The attributes and inputs of one of a network's ``nodes``, by their names."""
    reads = [f"{nodes[source]['name']}[{output}]" for source, output, *_ in node["inputs"]]
    inputs = {f"input {place}": name for place, name in enumerate(reads)}
    return {**node.get("attrs", {}), **inputs}


def _check_losses(trace: Trace) -> None:
    if trace.outputs_without_loss:
        raise LossError(
            f"output {trace.outputs_without_loss[0]!r} is no loss: its gradient would have to be "
            f"known before the step runs, as gradients are computed within forward. Wrap it in "
            f"MakeLoss, or in BlockGrad if it is not to be trained, bind with for_training=False, "
            f"or use mx.mod.Module"
        )

"""The ways in which MXNet is made to run a schedule: the one door from planning to MXNet.

A realisation is a class in a file of ``memplan/mxnet/realise``, and a row of
:data:`memplan.strategies.REALISATIONS`. MXNet is imported when the first one is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from memplan.errors import ArgumentError, CostError, TraceError
from memplan.memory.memory import Memory, Workspace
from memplan.memory.packing import Packing
from memplan.step.costs import CostTable
from memplan.step.schedule import Schedule
from memplan.strategies import REALISATIONS, check_realisation
from memplan.util.garbage import no_collections
from memplan.util.numbers import shown
from memplan.util.progress import LOGGER

if TYPE_CHECKING:
    from memplan.mxnet.trace.build import Trace

# What to ask for where a network is to be run by the best realisation that it allows; these, in
# this order: packed memory holds least, and explicit steps refuse fewer networks.
AUTO = "auto"
# The realisation whose steps update the parameters, too.
UPDATING = "updating"
WHOLE_STEPS = ("packed", "explicit")

# MXNet's Symbol and Context: planning is possible to import without MXNet.
Symbol = Any
Context = Any
Optimizer = Any
Shape = Sequence[int]


class Realisation(Protocol):
    """How MXNet is made to run a schedule; also the :class:`memplan.mxnet.trace.form.Form` of the
    training graph that it runs, which says what it refuses.

    ``spells_out_backward``: is what MXNet runs the whole step, gradients as outputs, rather than
    the network of which it derives them? ``in_one_array``: do its tensors lie in one array?
    ``binds``: checking and binding a plan takes about this many times what binding the unplanned
    step takes.
    """

    name: ClassVar[str]
    spells_out_backward: ClassVar[bool]
    in_one_array: ClassVar[bool]
    binds: ClassVar[float]

    def check_context(self, ctx: Context | None) -> None:
        """ArgumentError where this realisation cannot run on ``ctx``."""

    def check_environment(self) -> None:
        """Warn where a setting of the process undoes what this realisation does."""

    def memory(self, trace: Trace) -> Memory:
        """What a schedule of ``trace`` takes, with all that this realisation adds to it."""

    def workspace(self, trace: Trace, device_type: str) -> Workspace | None:
        """What a step of ``trace`` takes beside :meth:`memory`; None where that is not known."""

    def realise(self, trace: Trace, schedule: Schedule) -> Symbol:
        """The network that makes MXNet execute ``schedule``; ScheduleError if it cannot."""

    def allocated(
        self, trace: Trace, schedule: Schedule, packing: Packing | None
    ) -> tuple[int, int]:
        """The bytes that MXNet allocates for it, and the match range at which: the last word.

        ``packing`` says where its tensors lie, if in one array. ScheduleError as of ``realise``.
        """


@functools.cache
def load(name: str) -> Realisation:
    """The realisation of this name; ArgumentError if there is none.

    Raises DependencyError without MXNet.
    """
    check_realisation(name)
    module, _, cls = REALISATIONS[name].where.partition(":")
    realisation: Realisation = getattr(importlib.import_module(module), cls)()
    return realisation


def runs_whole_steps(name: str) -> bool:
    """Does MXNet get the whole step by this realisation, gradients included?"""
    if not isinstance(name, str):
        return False
    return name == AUTO or (name in REALISATIONS and load(name).spells_out_backward)


def may_pack(name: str) -> bool:
    """May steps of this realisation run in one array? With "auto" the network decides."""
    return name == AUTO or load(name).in_one_array


def suited(name: str, contexts: Iterable[Context]) -> str:
    """``name``, but for "auto" on contexts on which packed memory is not possible: the next best.

    So all of ``contexts`` train by plans of one kind.
    """
    if usable(name) is not None:
        return name
    refusal = why_not_packed(contexts)
    if refusal is None:
        return name
    LOGGER.warning("memplan trains by %s steps, for %s", WHOLE_STEPS[-1], refusal)
    return WHOLE_STEPS[-1]


def why_not_packed(contexts: Iterable[Context]) -> str | None:
    """Why packed memory is not possible on one of ``contexts``; None if it is on all."""
    try:
        for ctx in contexts:
            load(WHOLE_STEPS[0]).check_context(ctx)
    except ArgumentError as error:
        return _without_advice(str(error))
    return None


def usable(name: str) -> str | None:
    """The realisation that a strategy must serve; None where it is still to be chosen.

    ArgumentError if there is none of this name.
    """
    check_realisation(name, besides=(AUTO,))
    return None if name == AUTO else name


def trace(net: Symbol, *, realisation: str = "mirror", **options: Any) -> Trace:
    """The training graph of ``net`` in the form that the realisation of this name runs.

    ``options`` are those of :func:`memplan.mxnet.trace.build.trace`. Raises TraceError for an op
    that this realisation cannot run.
    """
    form: Any = load(realisation)
    from memplan.mxnet.trace.build import trace as build

    with no_collections():
        return build(net, form=form, **options)


def trace_by(name: str, net: Symbol, **options: Any) -> tuple[Realisation, Trace]:
    """The realisation of this name and its trace of ``net``; for "auto", the first that can run it.

    Then the log says why the others cannot. ``options`` are those of :func:`trace`, and so are the
    errors; where each refuses another op, the error names both.
    """
    *others, last = WHOLE_STEPS if name == AUTO else (name,)
    for other in others:
        try:
            return load(other), trace(net, realisation=other, **options)
        except TraceError as error:
            refusal = f"{other} steps cannot train this network: {error}"
    try:
        traced = trace(net, realisation=last, **options)
    except TraceError as error:
        if not others or str(error) in refusal:
            raise
        both = [_without_advice(text) for text in (refusal, str(error))]
        raise TraceError(
            f"{both[0]}; nor can {last} steps: {both[1]}. A mirror plan may train it, which is "
            f"memplan.plan(net, ...).symbol, with mx.mod.Module; else leave one of the two out"
        ) from error
    if others:
        LOGGER.warning("memplan trains by %s steps, for %s", last, _without_advice(refusal))
    return load(last), traced


def _without_advice(refusal: str) -> str:
    """Why a realisation refuses a network, without the one to use instead, which is tried next."""
    return re.split(r"[.;] [Uu]se realisation=", refusal)[0]


def request_of(traced: Trace, *, device_type: str) -> dict[str, Any]:
    """All that makes ``traced`` again by :func:`trace_again`, fit for JSON."""
    from memplan.mxnet.trace.request import request_of as request

    return request(traced, device_type=device_type)


def trace_again(request: Mapping[str, Any], *, match_range: int) -> Trace:
    """The trace that :func:`request_of` describes, under this NNVM_EXEC_MATCH_RANGE."""
    from memplan.mxnet.trace.request import trace_again as again

    form: Any = load(request["realisation"])
    return again(request, form=form, match_range=match_range)


def as_traced(traced: Trace) -> AbstractContextManager[None]:
    """What is bound within is bound as it was when ``traced`` was made."""
    from memplan.mxnet.trace.request import as_traced as settings

    return settings(traced)


def symbol_of(traced: Trace, schedule: Schedule) -> Symbol:
    """The network that makes MXNet execute ``schedule`` of ``traced``."""
    with as_traced(traced):
        return load(traced.form.name).realise(traced, schedule)


def optimizer_nbytes(traced: Trace, optimizer: Optimizer) -> int:
    """What ``optimizer``, MXNet's or its name, keeps; ArgumentError for what is neither."""
    from memplan.mxnet.realise.optimizer_states import states_nbytes

    return states_nbytes(traced, optimizer)


def update_nbytes(traced: Trace, optimizer: Optimizer) -> int:
    """What ``optimizer`` makes and drops as it updates; ArgumentError for what is none."""
    from memplan.mxnet.realise.update_workspace import update_nbytes as nbytes

    return nbytes(traced, optimizer)


def of_unplanned(way: Realisation, traced: Trace) -> tuple[Realisation, Trace]:
    """What tells the bytes of ``traced``, without a plan, as a network that packed steps can run.

    The loops are those that packed steps call, which MXNet can always bind. Where there are loops
    or branches whose shapes it does not know, memplan counts alone.
    """
    if all(node.subgraphs is None for node in traced.nodes):
        return way, traced
    from memplan.mxnet.realise.loop_copies import symbol_with_copies
    from memplan.mxnet.realise.mirror import Counted
    from memplan.mxnet.trace.operators import COND, WHILE_LOOP

    if any(node.op in (WHILE_LOOP, COND) for node in traced.nodes):
        return Counted(), traced
    return way, dataclasses.replace(traced, symbol=symbol_with_copies(traced.symbol))


def step_mib(net: Symbol, shapes: Mapping[str, Shape], type_dict: Mapping[str, Any] | None) -> int:
    """Whole MiB that MXNet says it allocates to train ``net``, by the flags that it carries."""
    from memplan.mxnet.realise.measure import step_mib as measured

    return measured(net, shapes, type_dict)


def taken_from_cudnn(net: Symbol) -> int:
    """How many BatchNorms of a mirrored network MXNet's own kernel computes on a GPU, too."""
    from memplan.mxnet.trace import symbol_json
    from memplan.mxnet.trace.operators import CUDNN_OFF_BEFORE

    return sum(CUDNN_OFF_BEFORE in attributes for _, attributes in symbol_json.attributes(net))


def measured_costs(net: Symbol, shapes: Mapping[str, Shape], **options: Any) -> CostTable:
    """Seconds of ops measured on a context; CostError where that is not possible.

    ``options`` are those of :func:`memplan.mxnet.profile.profile_inputs`.
    """
    from memplan.mxnet.profile import profile_inputs

    try:
        return profile_inputs(net, shapes, **options)
    except CostError as error:
        raise CostError(
            f"{str(error).rstrip('.')}; to plan for a GPU that is not here, pass "
            "costs='roofline:v100' (or another), or a table measured there"
        ) from error


def check_is_context(ctx: Any) -> None:
    """ArgumentError for what is none of MXNet's contexts."""
    if not hasattr(ctx, "device_type"):
        raise ArgumentError(f"ctx must be a context such as mx.gpu(0), got {shown(ctx)}")


def device_of(ctx: Context | None) -> str | None:
    """Where costs must come from; only the kind of device, for a GPU not in this machine."""
    if ctx is None:
        return None
    from memplan.mxnet.trace.device import device_name

    try:
        return device_name(ctx)
    except CostError:
        return str(ctx.device_type)

"""Measures what every op of a training step costs on a device, in the place where it runs.

There an op meets the memory layouts of the network: oneDNN converts where two neighbours disagree,
and equal ops alone do not show that. It is timed by :mod:`memplan.mxnet.realise.stopwatch`.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import ArgumentError, CostError
from memplan.memory.memory import Blocks
from memplan.mxnet.realise.estimate.code_in_memory import PACKED_CALL_NBYTES, uncounted_nbytes
from memplan.mxnet.realise.explicit import Explicit
from memplan.mxnet.realise.kept_operators import KeptOperators
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.mirror import Mirror, annotate, unread_ops
from memplan.mxnet.realise.packed import Packed
from memplan.mxnet.realise.packed_step import PackedStep
from memplan.mxnet.realise.stopwatch import (
    Stopwatch,
    call_seconds,
    callback_seconds,
    undisturbed,
)
from memplan.mxnet.trace.arguments import GradReq
from memplan.mxnet.trace.build import Trace, trace
from memplan.mxnet.trace.device import device_name
from memplan.mxnet.trace.environment import variable
from memplan.mxnet.trace.form import STOCK, Form
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.said import said
from memplan.mxnet.train.random_run import bind, random_arrays
from memplan.mxnet.train.train_executor import TrainExecutor
from memplan.mxnet.train.trial import run_apart
from memplan.planning.realisation import (
    Realisation,
    check_is_context,
    runs_whole_steps,
    trace_by,
    usable,
)
from memplan.search.segments import articulation_points, threshold_cuts
from memplan.step.costs import CostTable
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule
from memplan.strategies import REALISATIONS
from memplan.strategies.spaces.space import Space
from memplan.util.numbers import plain, shown
from memplan.util.progress import tell

# More steps than anyone waits for.
MOST_STEPS = 10**6


def profile(
    net: mx.sym.Symbol,
    *,
    ctx: mx.Context | None = None,
    type_dict: Mapping[str, Any] | None = None,
    grad_req: GradReq = None,
    realisation: str = "mirror",
    repeats: int = 5,
    warmup: int = 2,
    **shapes: Sequence[int],
) -> CostTable:
    """Measured seconds of every op of a training step of ``net`` on ``ctx``.

    ``shapes`` names the input shapes, as in ``simple_bind``; ``type_dict`` and ``grad_req`` are
    those of :func:`memplan.mxnet.trace.build.trace`; ``ctx`` is the current context if None. The
    step runs ``warmup + repeats`` times on random numbers, with the forward pass recomputed in
    segments so that it takes little memory: a network that does not fit unplanned can mostly be
    profiled still. The network's own arrays are not touched. With ``realisation="explicit"`` or
    "packed" such a step is measured as well: the table has the ops of both graphs, those of its own
    as they run there. With "packed", and on a GPU, it also has the workspace of operators, measured
    in a process of its own; what an executor keeps on a CPU depends on the schedule, and stays an
    estimate.

    An op costs the lower quartile of the repeats, for other work on the machine only slows; a
    signature, the mean over its ops, so that the sum over the step stays true where one of several
    equal ops pays for a change of layout. Ops of a
    few microseconds come out up to twice too expensive. Raises CostError if MXNet cannot run the
    step, and all that :func:`trace` raises.
    """
    options: dict[str, Any] = {"ctx": ctx, "type_dict": type_dict, "grad_req": grad_req}
    options |= {"realisation": realisation, "repeats": repeats, "warmup": warmup}
    return profile_inputs(net, shapes, **options)


def profile_inputs(
    net: mx.sym.Symbol,
    shapes: Mapping[str, Sequence[int]],
    *,
    ctx: mx.Context | None = None,
    type_dict: Mapping[str, Any] | None = None,
    grad_req: GradReq = None,
    realisation: str = "mirror",
    repeats: int = 5,
    warmup: int = 2,
) -> CostTable:
    """What :func:`profile` gives, for inputs that may have any names."""
    repeats, warmup = plain(repeats), plain(warmup)
    for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or not least <= value <= MOST_STEPS:
            raise ArgumentError(
                f"{name} must be an integer from {least} to {MOST_STEPS}, got {shown(value)}"
            )
    ctx = mx.current_context() if ctx is None else ctx
    check_is_context(ctx)
    seconds: dict[str, float] = {}
    usable(realisation)  # or there is none of this name
    options: dict[str, Any] = {"shapes": shapes, "type_dict": type_dict, "grad_req": grad_req}
    options["device_type"] = ctx.device_type
    way, to_train = trace_by(realisation, net, **options)
    own: Form = Packed() if way.in_one_array else Explicit()
    for form in (STOCK, own) if runs_whole_steps(realisation) else (STOCK,):
        traced = trace(net, form=form, **options)
        seconds |= _seconds_of_ops(traced, ctx, warmup, repeats)
    workspace = _workspaces(way, to_train, ctx)
    inputs = {name: traced.shapes[name] for name in shapes}
    return CostTable(device_name(ctx), seconds, inputs, workspace)


def _workspaces(way: Realisation, traced: Trace, ctx: mx.Context) -> dict[str, int]:
    """The bytes of workspace by realisation, as far as that is measured."""
    if way.in_one_array:
        return {way.name: _workspace_nbytes(way, traced, ctx)}
    if ctx.device_type != "gpu":
        return {}
    # Costs alone are a plan, too: without workspaces where a second process has no room.
    with contextlib.suppress(CostError):
        return {way.name: _workspace_nbytes(way, traced, ctx)}
    return {}


def _workspace_nbytes(way: Realisation, traced: Trace, ctx: mx.Context) -> int:
    """The bytes of workspace: what a process that trains takes beside arrays.

    Of small networks the code is left out that packed plans do not count there. The schedule is a
    frugal one, so that a network is measured that does not fit unplanned.
    """
    tell("measuring workspaces")
    schedule = frugal_schedule(traced.graph, REALISATIONS[way.name].space)
    grown = run_apart(schedule, traced, ctx=ctx).grown_nbytes
    not_counted = uncounted_nbytes(traced.nodes, PACKED_CALL_NBYTES) if way.in_one_array else 0
    return max(0, grown - way.memory(traced).nbytes(schedule) - not_counted)


def _seconds_of_ops(traced: Trace, ctx: mx.Context, warmup: int, repeats: int) -> dict[str, float]:
    """Measured seconds of the ops of ``traced``, by signature."""
    graph = traced.graph
    schedule = frugal_schedule(graph, REALISATIONS[traced.form.name].space)
    if not traced.form.spells_out_backward:
        schedule = _without_readers(traced, schedule, ctx)
    try:
        if traced.form.in_one_array:
            floor, overhead = call_seconds(ctx)
            passes = _timed_calls(traced, schedule, ctx, warmup, repeats)
            places = _first_steps(traced, schedule)
        else:
            floor, overhead = callback_seconds(ctx)
            names, passes = _measure(traced, schedule, ctx, warmup, repeats)
            places = _places(traced, schedule, names)
    except MXNetError as error:
        reason = said(error)
        if ctx.device_type == "gpu" and not mx.runtime.Features().is_enabled("CUDA"):
            reason = "it is built without CUDA; install 'memplan[cu112]', on the machine of the GPU"
        raise CostError(f"MXNet cannot run a step of this network on {ctx}: {reason}") from error
    costs = defaultdict(list)
    for op, place in enumerate(places):
        if place is None:
            seconds = 0.0
        else:
            seconds = max(undisturbed(row[place] for row in passes) - overhead, floor)
        costs[graph.ops[op].signature].append(seconds)
    return {signature: statistics.fmean(of_ops) for signature, of_ops in costs.items()}


def frugal_schedule(graph: TrainingGraph, space: Space) -> Schedule:
    """The schedule that MXNet allocates least for, of the unplanned one and a few simple ones."""
    schedules = [Schedule.unplanned(graph)]
    for points in (articulation_points(graph), range(graph.nforward)):
        for cut in threshold_cuts(graph, points, at_most=16):
            schedules.append(space.keeping(graph, cut))
    return min(schedules, key=Blocks((graph.match_range,)).nbytes)


def _without_readers(traced: Trace, schedule: Schedule, ctx: mx.Context) -> Schedule:
    """``schedule`` with fewer flags, so that MXNet runs it without any op added."""
    flags = frozenset(schedule.recomputed)
    on_gpu = ctx.device_type == "gpu"
    while to_keep := unread_ops(traced, flags, on_gpu=on_gpu, for_timing=True):
        flags -= to_keep
    return mirror(traced.graph, flags)


def _measure(
    traced: Trace, schedule: Schedule, ctx: mx.Context, warmup: int, repeats: int
) -> tuple[list[str], list[list[float]]]:
    """The outputs that a step computes, in order, and the seconds before each, for each repeat."""
    executor: mx.executor.Executor | TrainExecutor
    if traced.form.spells_out_backward:
        arguments, states = random_arrays(traced, ctx)
        executor = TrainExecutor(traced, schedule, ctx=ctx, args=arguments, aux_states=states)
        head_gradients, watch = None, executor.watch
    else:
        Mirror().check_environment()
        symbol = annotate(traced, frozenset(schedule.recomputed), for_timing=True)
        # A plan is made of ops, not of the kernels into which MXNet fuses them on a GPU.
        with variable("MXNET_USE_FUSION", "0"):
            executor = bind(traced, symbol, ctx)
        head_gradients = [mx.nd.ones_like(output) for output in executor.outputs]
        watch = executor.set_monitor_callback
    stopwatch = Stopwatch(watch)
    passes = []
    for number in range(warmup + repeats):
        tell(f"profiling, step {number + 1} of {warmup + repeats}")
        with stopwatch.running():
            executor.forward(is_train=True)
        with stopwatch.running():
            executor.backward(head_gradients)
        names, seconds = stopwatch.take()
        passes.append(seconds)
    if any(len(seconds) != len(names) for seconds in passes):
        raise CostError("MXNet did not call back for every output of every step; profile again")
    return names, passes[warmup:]


def _timed_calls(
    traced: Trace, schedule: Schedule, ctx: mx.Context, warmup: int, repeats: int
) -> list[list[float]]:
    """The seconds of every call of a packed step, for each repeat."""
    arguments, states = random_arrays(traced, ctx)
    executor = TrainExecutor(traced, schedule, ctx=ctx, args=arguments, aux_states=states)
    arrays = {**executor.inputs, **executor.aux_dict}
    memory, operators = executor.memory, KeptOperators()
    step = PackedStep(traced, schedule, ctx=ctx, arrays=arrays, memory=memory, operators=operators)
    passes = []
    for number in range(warmup + repeats):
        tell(f"profiling, step {number + 1} of {warmup + repeats}")
        passes.append(step.timed())
    return passes[warmup:]


def _first_steps(traced: Trace, schedule: Schedule) -> list[int | None]:
    """For each op the first step at which it runs."""
    first: dict[int, int] = {}
    for step, (op, _) in enumerate(_steps(traced, schedule)):
        first.setdefault(op, step)
    return [first[op] for op in range(len(traced.graph.ops))]


def _places(traced: Trace, schedule: Schedule, names: Sequence[str]) -> list[int | None]:
    """For each op, the place in ``names`` of the first output of its first execution.

    Not of a copy, which may run with its outputs unwanted and then does nothing. None where
    MXNet skips the op: a ``_grad_add`` whose summand is added in place by the op that computes
    it. MXNet calls back for all other steps of the schedule, once for each output. Raises
    CostError if it did not.
    """
    # Copies, and the backward ops of flagged ops, carry this in their names.
    stock_names = [name.replace("_mirror", "") for name in names]
    places: dict[int, int | None] = {}
    place = 0
    for op, node in _steps(traced, schedule):
        # Gradients of the terms of an add_n have no names, and MXNet calls their outputs so.
        prefix = node.name.replace("_mirror", "") + "_" if node.name else "output"
        outputs = stock_names[place : place + node.noutputs]
        if len(outputs) == node.noutputs and all(name.startswith(prefix) for name in outputs):
            places.setdefault(op, place)
            place += node.noutputs
        elif node.op == "_grad_add":
            places[op] = None
        else:
            _disagree(outputs, prefix + "...")
    if place != len(stock_names):
        _disagree(stock_names[place:], "nothing more")
    return [places[op] for op in range(len(traced.graph.ops))]


def _steps(traced: Trace, schedule: Schedule) -> list[tuple[int, Node]]:
    """The op and the node of every step that MXNet runs; op -1 where the realisation adds one."""
    if not traced.form.spells_out_backward:
        return [(op, traced.nodes[op]) for op in schedule.ops]
    lowered = lower(traced, schedule)
    op_of = {lowered.index_of[node]: op for op, node in enumerate(traced.nodes)}
    return [(op_of.get(index, -1), lowered.nodes[index]) for index in lowered.schedule.ops]


def _disagree(outputs: Sequence[str], expected: str) -> None:
    raise CostError(
        f"MXNet computed {outputs[0] if outputs else 'nothing more'!r} where memplan expected "
        f"{expected!r}: the costs would be those of other ops. Unset MXNET_BACKWARD_DO_MIRROR and "
        f"MXNET_SUBGRAPH_BACKEND if they are set; otherwise please report this network"
    )

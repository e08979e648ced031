"""A schedule as a Symbol that spells out the whole training step, for MXNet to run as it stands.

MXNet runs a graph depth-first, so a control dependency of every op on the one before it makes its
order that of the schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mxnet as mx

from memplan.errors import TraceError
from memplan.memory.blocks import best_allocation
from memplan.memory.memory import Blocks, Memory, Workspace
from memplan.memory.packing import Packing
from memplan.memory.temporary import Temporary
from memplan.mxnet.realise import gradient_of_lrn
from memplan.mxnet.realise.bind import PLACED
from memplan.mxnet.realise.deconvolution import replace_weight_gradients
from memplan.mxnet.realise.estimate.layout_rules import rules
from memplan.mxnet.realise.estimate.workspace_estimate import executor_nbytes
from memplan.mxnet.realise.lowering import Lowered, lower, lowered_memory
from memplan.mxnet.realise.measure import allocated_nbytes
from memplan.mxnet.realise.rewrite import (
    check_sparse_products,
    explicit_order,
    keep_order,
    left_as_it_was,
    repeatable_nodes,
    runnable,
    tell_shapes,
)
from memplan.mxnet.realise.turned_layouts import with_layouts_as_turned
from memplan.mxnet.realise.varying_layouts import (
    check_sensitive,
    with_notes_for_their_data,
)
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.form import Form, is_in_halves, run_once_by_executor
from memplan.mxnet.trace.layouts import must_be_in_place
from memplan.mxnet.trace.nnvm import Entry, Node, count_readers, depth_first, to_symbol
from memplan.mxnet.trace.operators import (
    ignored_inputs,
    is_gradient_of_slopes,
    is_made_of_symbol,
    is_true,
    keeps_gradient,
    must_not_be_in_place,
    runs_user_code,
)
from memplan.mxnet.trace.probe import counts_as_backward
from memplan.mxnet.trace.shared_gradients import is_shared
from memplan.step.graph import UPDATE, TrainingGraph
from memplan.step.halves import in_halves
from memplan.step.schedule import Schedule

# MXNet merges ops that differ in nothing, which would undo recomputation: this attribute, which
# operators do not see, tells them apart.
_DISTINCT = "__memplan_step__"

# The only operator whose ``shape`` is not that of what it writes, but a parameter of what it draws.
_SHAPED_OTHERWISE = "_npi_gamma"


@dataclass(frozen=True)
class Explicit(Form):
    """By a Symbol of the whole step, in which MXNet derives nothing: any schedule can be run."""

    name: ClassVar[str] = "explicit"
    spells_out_backward: ClassVar[bool] = True
    binds: ClassVar[float] = 4.0

    def rewritten(self, heads: Sequence[Entry], device_type: str) -> list[Entry]:
        """``heads`` as a Symbol can hold them.

        TraceError for user code, loops, a PReLU whose slopes the schedule would decide on, and
        gradients that MXNet does not write.
        """
        by_onednn = is_by_onednn(device_type)
        order = depth_first(heads)
        nreaders = count_readers(order, heads)
        check_sparse_products(order, nreaders)
        for node in order:
            forward = node.forward
            if reason := left_as_it_was(node, nreaders, by_onednn=by_onednn):
                raise TraceError(f"{reason}. Use realisation='packed', on cpu(0) or a GPU")
            if is_gradient_of_slopes(node) and nreaders[node, 1]:
                _check_slopes(node, nreaders, of_argument=(node, 0) in heads)
            if forward is not None and is_made_of_symbol(forward):
                raise TraceError(
                    f"op {forward.name!r} ({forward.op}) cannot be trained by an explicit plan: "
                    f"MXNet cannot write its backward op into a Symbol. Use realisation='packed', "
                    f"on cpu(0) or a GPU; on other contexts mx.mod.Module trains it by the Symbol "
                    f"that memplan.search_plan returns"
                )
        gradient_of_lrn.as_in_blocks(heads, device_type)
        heads = runnable(heads)
        tell_shapes(depth_first(heads))
        return replace_weight_gradients(heads) if device_type == "cpu" else heads

    def outside(
        self, heads: Sequence[Entry], noutputs: int, requests: Mapping[str, str]
    ) -> set[Entry]:
        """No gradient: all of them are tensors of the step, like other outputs."""
        return set()

    def ordered(self, order: Sequence[Node], forward: Collection[Node]) -> list[Node]:
        """Sums of gradients as early as possible."""
        return explicit_order(order)

    def repeatable(self, forward: Sequence[Node], order: Sequence[Node]) -> set[Node]:
        """All but random ops, those that keep a state or change what they read.

        And what must write over what it reads, or must not, which MXNet's executor decides;
        TraceError where it may do so whatever runs once.
        """
        nodes = {node for node in repeatable_nodes(forward) if not must_be_in_place(node)}
        _check_lives(order)
        return nodes - run_once_by_executor(order)

    def finished(
        self,
        graph: TrainingGraph,
        nodes: Sequence[Node],
        stock_order: Sequence[int],
        device_type: str,
    ) -> TrainingGraph:
        """Random ops keep their order, those on one state, and halves of a step theirs.

        On a CPU no numbers depend on layouts that the schedule decides on, but for their last bits;
        TraceError where they would.
        """
        if is_by_onednn(device_type):
            check_sensitive(graph, nodes)
            graph = with_notes_for_their_data(graph, nodes)
            graph = with_layouts_as_turned(graph, nodes)
        return in_order(graph, nodes)

    def memory(self, trace: Trace) -> Memory:
        """MXNet's blocks, at the match range that suits a schedule best."""
        return lowered_memory(trace, Blocks())

    def workspace(self, trace: Trace, device_type: str) -> Workspace | None:
        """An estimate for a CPU, of the executor that gets the step."""
        if not is_by_onednn(device_type):
            return None
        lowered = lower(trace, Schedule.unplanned(trace.graph))
        graph = lowered.schedule.graph
        estimate = executor_nbytes(graph, lowered.nodes, leaves_holes=False)
        nbytes, of_run, (overwriting, _) = estimate  # all that is recomputed is read
        places = [lowered.index_of[node] for node in trace.nodes]
        of_run, overwriting = (tuple(each[n] for n in places) for each in (of_run, overwriting))
        return nbytes, of_run, rules(trace.graph, trace.nodes), Temporary(overwriting)

    def realise(self, trace: Trace, schedule: Schedule) -> mx.sym.Symbol:
        """The Symbol of the step; ScheduleError for a schedule of another graph."""
        return training_symbol(trace, schedule)

    def allocated(
        self, trace: Trace, schedule: Schedule, packing: Packing | None
    ) -> tuple[int, int]:
        """Bytes and match range of MXNet's blocks."""
        symbol = self.realise(trace, schedule)
        replayed = best_allocation(lower(trace, schedule).schedule)
        nbytes = allocated_nbytes(symbol, trace, replayed, replayed.match_range)
        return nbytes, replayed.match_range


def in_order(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    """``graph``, whose random ops keep their order, those on one state, and halves of a step."""
    graph = dataclasses.replace(graph, ops=keep_order(graph.ops, nodes))
    return in_halves(graph) if is_in_halves(nodes) else graph


def _check_lives(order: Sequence[Node]) -> None:
    """TraceError where no backward op reads what an op must not write over, so that it may die.

    That of an np.diff reads nothing but its output's gradient.
    """
    differentiated = {node.forward for node in order}
    for node in order:
        if not must_not_be_in_place(node) or node.inputs[0][0].is_variable:
            continue
        if node.op == "_npi_diff":
            raise TraceError(
                f"op {node.name!r} (np.diff with n=0) cannot be run by an explicit plan: MXNet's "
                f"executor may write zeros over what it reads. Leave it out, as it changes "
                f"nothing, or use realisation='packed'"
            )
        if node not in differentiated:
            raise TraceError(
                f"op {node.name!r} (np.ediff1d with to_begin or to_end) has no gradient here, and "
                f"MXNet's executor then may write its output over what it reads before all is "
                f"read; put the number beside np.ediff1d(x) by np.concatenate, or use "
                f"realisation='packed'"
            )


def _check_slopes(node: Node, nreaders: Mapping[Entry, int], *, of_argument: bool) -> None:
    """TraceError where the backward op of a PReLU would write over what it does not unplanned.

    MXNet writes over the gradient that it reads where that dies, and the gradient of the slopes is
    another one then: a plan may let it die earlier, or later, than the unplanned step does. Nor
    does MXNet write over it where the PReLU reads an argument whose gradient is wanted, which has
    an array of its own there, or where autograd calls the op by itself.
    """
    assert node.forward is not None
    name, advice = node.forward.name, "realisation='packed' (for mx.mod.Module 'mirror', too)"
    if keeps_gradient(node):
        reason = "MXNet's executor would write over the gradient of its output, the block does not"
        advice = "realisation='packed', on cpu(0) or a GPU"
    elif of_argument:
        reason = f"it reads {node.forward.inputs[0][0].name!r}, whose gradient is wanted, too"
    elif is_shared(node.inputs[0], nreaders):
        reason = "it shares the gradient of its output with another op, as the terms of a sum do"
    else:
        return
    raise TraceError(
        f"op {name!r} (LeakyReLU, act_type='prelu') cannot be trained by an explicit plan: "
        f"{reason}, and the gradient of its slopes would depend on the schedule. Use {advice}, "
        f"or freeze the slopes (grad_req 'null')"
    )


def training_symbol(trace: Trace, schedule: Schedule) -> mx.sym.Symbol:
    """The Symbol that makes MXNet execute ``schedule`` of a ``trace`` made for "explicit".

    Its outputs are those of the network, then the gradients in the order of the arguments, some of
    which have what was there added already (:attr:`Trace.old_gradients`, which it reads). It is
    bound by :class:`memplan.mxnet.executor.TrainExecutor`. Raises ScheduleError for a
    schedule of another graph.
    """
    lowered = lower(trace, schedule)
    steps = step_nodes(lowered)
    sources = iter(lowered.schedule.heads)
    heads = [
        (node, k) if node.is_variable else (steps[next(sources)], k) for node, k in trace.heads
    ]
    # MXNet has no operator for an update: in its place stands the gradient that it reads.
    return to_symbol([node.inputs[0] if node.op == UPDATE else (node, k) for node, k in heads])


def step_nodes(lowered: Lowered) -> list[Node]:
    """The node of every step of a lowered schedule, which reads those of the steps it reads."""
    writer = _Writer(lowered)
    for op, reads in zip(lowered.schedule.ops, lowered.schedule.reads, strict=True):
        writer.add(op, reads)
    return writer.nodes


def step_attrs(node: Node, *, is_copy: bool) -> dict[str, str]:
    """The attributes with which a step runs ``node``, for the first time or, a copy, again."""
    attrs = dict(node.attrs)
    info = node.infos.outputs[0] if node.infos.outputs else None
    is_of_output = not node.inputs and "shape" in attrs and node.op != _SHAPED_OTHERWISE
    if is_of_output and info is not None:
        # An unknown dimension would be inferred from readers, which a copy may not have.
        attrs["shape"] = str(info.shape)
    if node.op == "_arange" and is_true(attrs.get("infer_range")) and info is not None:
        # Called by itself it asks for the end, though its length is known. Halfway to the next one.
        nsteps = info.shape[0] // int(attrs.get("repeat", 1)) - 0.5
        start, step = float(attrs.get("start", 0)), float(attrs.get("step", 1))
        attrs |= {"infer_range": "False", "stop": repr(start + nsteps * step)}
    if is_copy and node.op == "BatchNorm":
        # cuDNN updates the statistics in every forward call: so a copy leaves them alone.
        # Elsewhere the backward op does it, by its own momentum.
        attrs["momentum"] = "1"
    return attrs


class _Writer:
    """Makes the nodes of a lowered schedule, step by step."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.nodes: list[Node] = []
        self.before: Node | None = None
        self.latest: dict[int, Node] = {}
        self.runs = [0] * len(lowered.nodes)
        self.keys: set[tuple[object, ...]] = set()

    def add(self, op: int, reads: tuple[int, ...]) -> None:
        """Make the node of the next step, which runs ``op``."""
        node = self.lowered.nodes[op]
        inputs = self._inputs(node, reads)
        control = [self._latest(other) for other in node.control]
        if self.before is not None and (control or not counts_as_backward(node)):
            # The forward op comes first: MXNet takes shapes and state from it.
            control.append(self.before)
        step_node = Node(
            node.op,
            f"{node.name}_again{self.runs[op]}" if self.runs[op] else node.name,
            self._attrs(node, op, inputs, is_placed=bool(control)),
            inputs,
            tuple(dict.fromkeys(control)),
            node.noutputs,
            node.subgraphs,
        )
        self.nodes.append(step_node)
        if node.op != UPDATE:
            self.before = step_node
        self.latest[op] = step_node
        self.runs[op] += 1

    def _inputs(self, node: Node, reads: tuple[int, ...]) -> list[Entry]:
        ignored = ignored_inputs(node)
        sources = iter(reads)
        result = []
        for place, (source, k) in enumerate(node.inputs):
            if source.is_variable:
                result.append((source, k))
            elif place in ignored:
                result.append((self._latest(source), k))
            else:
                result.append((self.nodes[next(sources)], k))
        return result

    def _latest(self, node: Node) -> Node:
        return self.latest[self.lowered.index_of[node]]

    def _attrs(
        self, node: Node, op: int, inputs: list[Entry], *, is_placed: bool
    ) -> dict[str, str]:
        """Its attributes, and those that tell it apart and, unless it ``is_placed``, place it."""
        attrs = step_attrs(node, is_copy=self.runs[op] > 0)
        if runs_user_code(node.op):  # nor does MXNet merge such ops
            return attrs
        key = (node.op, *sorted(attrs.items()), *inputs)
        if key in self.keys:
            attrs[_DISTINCT] = str(len(self.nodes))
        self.keys.add(key)
        return attrs if is_placed else attrs | PLACED

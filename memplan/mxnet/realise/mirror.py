"""Writes a set of flags on a network, so that MXNet's own executor runs the mirrored schedule."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar

import mxnet as mx

from memplan.memory.blocks import allocate
from memplan.memory.memory import Blocks, Workspace
from memplan.memory.packing import Packing
from memplan.mxnet.realise.estimate.layout_rules import rules
from memplan.mxnet.realise.estimate.workspace_estimate import executor_nbytes
from memplan.mxnet.realise.measure import allocated_nbytes
from memplan.mxnet.realise.turned_layouts import with_layouts_as_turned
from memplan.mxnet.realise.varying_layouts import with_layouts_of_unmirrored
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.form import Form
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import (
    CONVOLUTIONS,
    CUDNN_OFF_BEFORE,
    READS_FOR_PLAN,
    may_run_on_cudnn,
)
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flags_of, mirror
from memplan.step.schedule import Schedule


@dataclass(frozen=True)
class Mirror(Form):
    """By attributes on the network: MXNet's own executor recomputes what carries them."""

    name: ClassVar[str] = "mirror"
    binds: ClassVar[float] = 2.0

    def check_environment(self) -> None:
        """Warn where MXNET_BACKWARD_DO_MIRROR makes MXNet mirror ops that a plan keeps."""
        if os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0") not in ("0", "false", ""):
            warnings.warn(
                "MXNET_BACKWARD_DO_MIRROR is set: MXNet then also recomputes what a plan keeps, "
                "which undoes the plan. Unset it before binding the planned network.",
                stacklevel=2,
            )

    def finished(
        self,
        graph: TrainingGraph,
        nodes: Sequence[Node],
        stock_order: Sequence[int],
        device_type: str,
    ) -> TrainingGraph:
        """On a CPU fewer ops may run twice where a gradient would be another one by that.

        Nor may they where others would read what a Reshape turns in another layout.

        The notes of a max pooling are for what its backward op reads: unless the pooling itself
        comes again, MXNet has that read what the pooling has read, and where a Reshape has turned
        that since, it lay before in the layout that it has in a step without flags.
        """
        if not is_by_onednn(device_type):
            return graph
        return with_layouts_as_turned(with_layouts_of_unmirrored(graph, nodes), nodes)

    def memory(self, trace: Trace) -> Blocks:
        """MXNet's blocks, at the match range under which the network was traced."""
        return Blocks((trace.graph.match_range,))

    def workspace(self, trace: Trace, device_type: str) -> Workspace | None:
        """An estimate for a CPU, of its executor."""
        if not is_by_onednn(device_type):
            return None
        graph, nodes = trace.graph, trace.nodes
        nbytes, of_run, temporary = executor_nbytes(graph, nodes, leaves_holes=True)
        return nbytes, of_run, rules(graph, nodes), temporary

    def realise(self, trace: Trace, schedule: Schedule) -> mx.sym.Symbol:
        """The network with its flags; ScheduleError where no flags give ``schedule``."""
        return annotate(trace, flags_of(schedule), on_gpu=trace.device_type == "gpu")

    def allocated(
        self, trace: Trace, schedule: Schedule, packing: Packing | None
    ) -> tuple[int, int]:
        """Bytes and match range of MXNet's blocks."""
        symbol, allocation = self.realise(trace, schedule), allocate(schedule)
        return allocated_nbytes(symbol, trace, allocation), allocation.match_range


@dataclass(frozen=True)
class Counted(Mirror):
    """Without MXNet's word on what its executor takes, of a network with a while_loop or a cond.

    The executor does not know the shapes of what these return, and of what is computed of that. It
    leaves them out of what it says, and some such networks cannot be bound, though blocks run them.
    """

    def allocated(
        self, trace: Trace, schedule: Schedule, packing: Packing | None
    ) -> tuple[int, int]:
        """Bytes and match range of MXNet's blocks, as memplan counts them."""
        allocation = allocate(schedule)
        return allocation.nbytes, allocation.match_range


def annotate(
    trace: Trace, flags: AbstractSet[int], *, on_gpu: bool = False, for_timing: bool = False
) -> mx.sym.Symbol:
    """A copy of the traced network whose ops in ``flags`` carry ``force_mirroring``.

    ``mirror_stage`` hints are kept. A flagged BatchNorm gets ``cudnn_off``, unless this is
    ``for_timing``: cuDNN updates the moving statistics in every forward call, and so twice where
    one is recomputed; MXNet's own kernels do so once, in the backward op, on any device
    (src/operator/nn/batch_norm.cu). Where nobody would read what must be read (:func:`unread_ops`),
    an identity op does, flagged as well, which costs no memory.
    """
    data = symbol_json.parse(trace.symbol)
    for op in flags:
        for index in trace.sources[op]:
            node = data["nodes"][index]
            attrs = node.setdefault("attrs", {})
            attrs["__force_mirroring__"] = "True"
            if not for_timing and may_run_on_cudnn(node["op"], attrs):
                attrs[CUDNN_OFF_BEFORE] = attrs.get("cudnn_off", "")
                attrs["cudnn_off"] = "True"
    for op in sorted(unread_ops(trace, flags, on_gpu=on_gpu)):
        for index in trace.sources[op]:
            _add_reader(data, index)
    del data["node_row_ptr"]
    return symbol_json.load(data)


def unread_ops(
    trace: Trace, flags: AbstractSet[int], *, on_gpu: bool, for_timing: bool = False
) -> frozenset[int]:
    """The flagged ops in which MXNet fails, as nobody reads the main output of a run of theirs.

    MXNet then asks the operator for no output (kNullOp), which some kernels do not know: on a GPU
    MXNet's own Convolution (depthwise) and Deconvolution; on a CPU these two where oneDNN does not
    compute them; on both MXNet's own Pooling, whose backward op reads the output, but of a flagged
    one that of the copy, while others may need the shape alone. Nor does cuDNN's BatchNorm, which
    :func:`annotate` replaces but ``for_timing``.
    """
    graph = trace.graph
    on_cudnn = on_gpu and for_timing
    suspects = {op for op in flags if _must_be_read(trace, op, on_gpu, on_cudnn)}
    if not suspects:
        return frozenset()
    schedule = mirror(graph, flags)
    inputs = [graph.ops[op].inputs for op in schedule.ops]
    calls = zip(inputs, schedule.reads, strict=True)
    read = {
        source
        for tensors, sources in (*calls, (graph.heads, schedule.heads))
        for tensor, source in zip(tensors, sources, strict=True)
        if tensor == graph.ops[schedule.ops[source]].outputs[0]
    }
    return frozenset(
        op for step, op in enumerate(schedule.ops) if op in suspects and step not in read
    )


def _must_be_read(trace: Trace, op: int, on_gpu: bool, on_cudnn: bool) -> bool:
    node = trace.nodes[op]
    if node.op == "Pooling" or (on_cudnn and may_run_on_cudnn(node.op, node.attrs)):
        return True
    if node.op not in CONVOLUTIONS:
        return False
    info = node.infos.outputs[0]
    return on_gpu or not trace.by_onednn or info is None or info.dtype != "float32"


def _add_reader(data: dict[str, Any], index: int) -> None:
    """Put an identity op, which gets its name, behind the main output of a node."""
    nodes = data["nodes"]
    for entry in (*(entry for node in nodes for entry in node["inputs"]), *data["heads"]):
        if entry[:2] == [index, 0]:
            entry[0] = len(nodes)
    nodes.append(
        {
            "op": "_copy",
            "name": nodes[index]["name"],
            "attrs": {"__force_mirroring__": "True", READS_FOR_PLAN: "True"},
            "inputs": [[index, 0, 0]],
        }
    )
    nodes[index]["name"] += "_unread"

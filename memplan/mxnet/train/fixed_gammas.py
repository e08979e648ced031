"""The gammas of BatchNorms through which no gradient goes: who writes 1 into them.

With ``fix_gamma`` a BatchNorm on a CPU writes 1 into its gamma if its mean is asked for
(IsBNWriting of MXNet's src/operator/nn/batch_norm-inl.h). An executor asks for that where a
backward op reads it, a hybridized block and a call of the operator alone in any training step. The
numbers of the step are those of a gamma of 1 all the same.
"""

from __future__ import annotations

from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.operators import fixes_gamma

# The places of the gamma among what a BatchNorm reads, and of the mean among what it writes.
_GAMMA = _MEAN = 1


def gammas_without_gradient(trace: Trace) -> list[str]:
    """The gammas of BatchNorms that fix them, and whose means nothing reads, no backward op either.

    Those are left out that another op reads, too.
    """
    read = {entry for node in trace.nodes for entry in node.inputs}.union(trace.heads)
    others: set[str] = set()
    names: dict[str, None] = {}
    for node in trace.nodes:
        fixes = node.op == "BatchNorm" and fixes_gamma(node)
        for place, (source, _) in enumerate(node.inputs):
            if fixes and place == _GAMMA and (node, _MEAN) not in read and source.is_variable:
                names[source.name] = None
            elif source.is_variable:
                others.add(source.name)
    return [name for name in names if name not in others]

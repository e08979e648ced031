"""The order in which parameters whose shapes were not known are initialised by the first step.

MXNet draws random numbers for them then: for those of a hybridized block in the order of its graph,
for others when the layer is called that has them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from memplan.mxnet.train.block_changes import hybridized

Block = Any
Parameter = Any


@contextlib.contextmanager
def noting_reads(params: Mapping[str, Parameter]) -> Iterator[list[str]]:
    """Within it the names of those of ``params`` that are not initialised, as layers read them."""
    waiting, read = [p for p in params.values() if p._deferred_init], list[str]()
    for parameter in waiting:
        parameter.var = functools.partial(_noted, parameter, read)
    try:
        yield read
    finally:
        for parameter in waiting:
            del parameter.var


def _noted(parameter: Parameter, read: list[str]) -> Any:
    read.append(parameter.name)
    return type(parameter).var(parameter)


def as_initialised(block: Block, read: Sequence[str], in_graph: Iterable[str]) -> list[str]:
    """The names ``in_graph``, of which layers of ``block`` have ``read`` some, in MXNet's order."""
    places = {name: place for place, name in reversed(list(enumerate(read)))}
    for root in hybridized([block]):
        names = places.keys() & root.collect_params().keys()
        places |= dict.fromkeys(names, min((places[name] for name in names), default=0))
    return sorted(in_graph, key=lambda name: places.get(name, len(read)))

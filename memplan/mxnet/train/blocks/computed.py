"""What a block computes now, beside what it did when it was planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from memplan.mxnet.trace.nnvm import shape_is_known
from memplan.mxnet.train.arrays.nesting import dtype_name
from memplan.mxnet.train.arrays.parameters import is_derived
from memplan.mxnet.train.blocks.block_network import BlockNetwork

Parameter = Any


class Computed:
    """What a block computes now: it is run once for every kind of inputs that is asked for.

    ``compose`` makes the network; ``state`` is that of the parameters now.
    """

    def __init__(self, compose: Callable[..., BlockNetwork], state: Any) -> None:
        self._compose, self._state = compose, state
        self.networks: dict[Any, BlockNetwork] = {}

    def gone(self, networks: Mapping[Any, BlockNetwork]) -> list[Any]:
        """The keys, which begin with kind and state, of those that are computed no longer.

        The others are of the blocks of now from then on.
        """
        # Whether it is the same network costs less to say than to make it, of the same state.
        keys = sorted(networks, key=lambda key: key[1] != self._state)
        gone = [key for key in keys if not self._is_network(networks[key], *key[:2])]
        for key in networks.keys() - gone:
            networks[key].user_code[:] = self.networks[key[0]].user_code
            networks[key].drawing[:] = self.networks[key[0]].drawing
        return gone

    def _is_network(self, network: BlockNetwork, kind: Any, state: Any) -> bool:
        """Is it ``network``, which was made when the parameters had this ``state``?"""
        if kind not in self.networks:
            known = network if state == self._state else None
            self.networks[kind] = self._compose(kind, known=known)
        other = self.networks[kind]
        return (other.structure, other.form) == (network.structure, network.form)


#: The first shape of a parameter that is known as a whole.
_FIRST: WeakKeyDictionary[Parameter, tuple[int, ...]] = WeakKeyDictionary()


def state_of(params: Mapping[str, Parameter]) -> tuple[Any, ...]:
    """What a plan depends on of the parameters."""
    return tuple(
        (p.name, p.grad_req, dtype_name(p.dtype), is_derived(p), _other_shape(p))
        for p in params.values()
    )


def _other_shape(parameter: Parameter) -> tuple[int, ...] | None:
    """The shape that a script has given it in the place of its first one; None where that is so.

    A shape that the first plan makes known is none of another state.
    """
    shape = parameter.shape
    if not shape_is_known(shape) or shape == _FIRST.setdefault(parameter, shape):
        return None
    return tuple(shape)

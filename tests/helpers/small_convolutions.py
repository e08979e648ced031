"""Small networks of convolutions, of which bytes in oneDNN's layouts are counted by hand."""

from __future__ import annotations

import mxnet as mx

Symbol = mx.sym.Symbol

SHAPE = (2, 16, 8, 8)
N = 2 * 16 * 8 * 8 * 4  # the bytes of a picture
WEIGHT = 16 * 16 * 9 * 4


def pictures() -> Symbol:
    """The input."""
    return mx.sym.Variable("data")


def convolved(data: Symbol, nfilter: int = 16, groups: int = 1) -> Symbol:
    return mx.sym.Convolution(
        data, num_filter=nfilter, kernel=(3, 3), pad=(1, 1), num_group=groups, no_bias=True
    )


def activated(data: Symbol) -> Symbol:
    return mx.sym.Activation(data, act_type="relu")


def pooled(data: Symbol) -> Symbol:
    return mx.sym.Pooling(data, kernel=(2, 2), stride=(2, 2), pool_type="max")


def normed(data: Symbol) -> Symbol:
    return mx.sym.BatchNorm(data, fix_gamma=False)


def classified(data: Symbol) -> Symbol:
    """The loss of four classes."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(data), num_hidden=4))

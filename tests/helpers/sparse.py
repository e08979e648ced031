"""Networks with sparse arrays."""

from __future__ import annotations

import mxnet as mx

from helpers.networks import Network, loss, var


def sparse_embedding() -> Network:
    words, weight = var(), var("weight")
    looked_up = [
        mx.sym.Embedding(w, weight, input_dim=30, output_dim=8, sparse_grad=True)
        for w in (words, words + 1)
    ]
    return loss(mx.sym.tanh(looked_up[0]) * mx.sym.relu(looked_up[1])), {"data": (4, 5)}


def sparse_dot() -> Network:
    body = mx.sym.sparse.dot(var(stype="csr"), var("weight", stype="row_sparse"))
    return loss(mx.sym.tanh(body)), {"data": (4, 30), "weight": (30, 8)}

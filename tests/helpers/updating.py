"""The network, and a batch for it, of which a Module updates the parameters within the step."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from helpers.networks import residual_net

NET = residual_net()[0]
SHAPES = {"data": (16, 3, 16, 16)}
OPTIONS: dict[str, Any] = {"realisation": "updating", "strategy": "store_all"}


def batch() -> Any:
    random = np.random.default_rng(1)
    data = mx.nd.array(random.normal(size=SHAPES["data"]))
    return mx.io.DataBatch([data], [mx.nd.array(random.integers(0, 10, 16))])

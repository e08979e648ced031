"""A job as text, for another process or machine to make it again."""

from __future__ import annotations

import dataclasses
import functools
import json

import mxnet as mx

from memplan.cache import digest
from memplan.errors import UsageError
from memplan.job import Job
from memplan.mxnet.environment import match_range
from memplan.mxnet.trace import trace
from memplan.result import Footprint


def pack(job: Job) -> str:
    """All that makes ``job`` again elsewhere, as JSON: the network, how to trace it, its costs."""
    traced = job.trace
    arguments = traced.symbol.list_arguments()
    return json.dumps(
        {
            "symbol": traced.symbol.tojson(remove_amp_cast=False),
            "trace": {
                "shapes": {name: traced.shapes[name] for name in arguments},
                "type_dict": {name: traced.dtypes[name] for name in arguments},
                "grad_req": dict(traced.grad_req),
                "realisation": job.realisation,
                "device_type": "gpu" if job.on_gpu else "cpu",
            },
            "match_range": job.graph.match_range,
            "seconds": [op.seconds for op in job.graph.ops],
            "graph": digest(job.graph.to_json()),
            "unplanned": dataclasses.asdict(job.unplanned),
            "costs": job.costs,
            "time_limit": job.time_limit,
            "reserve_nbytes": job.reserve_nbytes,
        }
    )


@functools.lru_cache(maxsize=2)
def unpack(text: str) -> Job:
    """The job that :func:`pack` wrote; UsageError if it is traced otherwise here."""
    data = json.loads(text)
    with match_range(data["match_range"]):
        traced = trace(mx.sym.load_json(data["symbol"]), **data["trace"])
    if len(traced.graph.ops) == len(data["seconds"]):
        graph = traced.graph.with_seconds(data["seconds"])
        if digest(graph.to_json()) == data["graph"]:
            return Job(
                trace=traced,
                graph=graph,
                realisation=traced.realisation,
                unplanned=Footprint(**data["unplanned"]),
                costs=data["costs"],
                on_gpu=data["trace"]["device_type"] == "gpu",
                time_limit=data["time_limit"],
                reserve_nbytes=data["reserve_nbytes"],
            )
    raise UsageError(
        "a worker of the executor traces the network otherwise than the process that asks: both "
        "need the same memplan and the same MXNet"
    )

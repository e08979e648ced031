"""A job as text, for another process or machine to make it again."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from memplan.errors import UsageError
from memplan.memory.layouts import Rule
from memplan.memory.temporary import Temporary
from memplan.planning.beside import Beside
from memplan.planning.cache import digest
from memplan.planning.job import Job
from memplan.planning.plan import Footprint
from memplan.planning.realisation import load, request_of, trace_again


def to_json(job: Job) -> str:
    """All that makes ``job`` again elsewhere, as JSON: the network, how to trace it, its costs."""
    return json.dumps(
        {
            "trace": request_of(job.trace, device_type="gpu" if job.on_gpu else "cpu"),
            "match_range": job.graph.match_range,
            "seconds": [op.seconds for op in job.graph.ops],
            "graph": digest(job.graph.to_json()),
            "unplanned": dataclasses.asdict(job.unplanned),
            "costs": job.costs,
            "time_limit": job.time_limit,
            "beside": dataclasses.asdict(job.beside),
            "max_overhead": job.max_overhead,
            "effort": job.effort,
        }
    )


@functools.lru_cache(maxsize=2)
def from_json(text: str) -> Job:
    """The job that :func:`to_json` wrote; UsageError if it is traced otherwise here."""
    data = json.loads(text)
    traced = trace_again(data["trace"], match_range=data["match_range"])
    if len(traced.graph.ops) == len(data["seconds"]):
        graph = traced.graph.with_seconds(data["seconds"])
        if digest(graph.to_json()) == data["graph"]:
            return Job(
                trace=traced,
                graph=graph,
                realisation=load(traced.form.name),
                unplanned=Footprint(**data["unplanned"]),
                costs=data["costs"],
                on_gpu=data["trace"]["device_type"] == "gpu",
                time_limit=data["time_limit"],
                beside=_beside(data["beside"]),
                max_overhead=data["max_overhead"],
                effort=data["effort"],
            )
    raise UsageError(
        "a worker of the executor traces the network otherwise than the process that asks: both "
        "need the same memplan and the same MXNet"
    )


def _beside(data: Mapping[str, Any]) -> Beside:
    of_run = tuple(data["workspace_of_run"])
    layouts = tuple(Rule(leaves, n, tuple(ignored)) for leaves, n, ignored in data["layouts"])
    temporary = Temporary(*map(tuple, data["temporary"]))
    parts = {"workspace_of_run": of_run, "layouts": layouts, "temporary": temporary}
    return Beside(**{**data, **parts})

"""A few training steps in a process of their own: what it takes, how long, what comes out.

The process that asks has libraries loaded, memory freed but not returned, and kernels made: what a
step takes is seen only in a new one. What it is to run goes to it as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from memplan.errors import CostError
from memplan.memory.packing import Packing
from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import current_match_range
from memplan.mxnet.trace.environment import match_range as under
from memplan.mxnet.trace.user_operators import defining_modules, import_modules, missing_operator
from memplan.mxnet.train.memory_growth import MemoryGrowth
from memplan.mxnet.train.random_run import random_arrays, zero_gradients
from memplan.mxnet.train.train_executor import TrainExecutor
from memplan.mxnet.train.updates import OptimizerUpdates
from memplan.planning.realisation import load, request_of, trace_again
from memplan.step.schedule import Schedule
from memplan.util.processes import calling_main, check_can_start, end_with, ending

NDArray = Any
Arrays = dict[str, NDArray]

# MXNet chooses kernels in the first steps, and makes workspaces; then it holds what it holds.
UNTIMED_STEPS = 3

# Steps are timed until they have taken so long: of a few that take less than 10 ms each most can be
# slow ones, in which another process had the processor.
LEAST_SECONDS = 0.3

_NOT_IN_MODULE = (
    "it knows no Custom op {!r}; define the op in a module that can be imported, and not in the "
    "script itself, which a new process cannot import without running it"
)


@dataclass(frozen=True)
class Trial:
    """``grown_nbytes``: by which the process grew in all steps, beyond arguments, states and
    gradients that MXNet is given. ``seconds``: the median of those after the first, and of
    further ones, if these are short.
    """

    grown_nbytes: int
    seconds: float


def run_apart(
    schedule: Schedule,
    traced: Trace,
    *,
    ctx: mx.Context,
    match_range: int | None = None,
    packing: Packing | None = None,
    steps: int = 1,
    optimizer: str = "sgd",
    results: Path | None = None,
) -> Trial:
    """Train by the ``schedule`` of ``traced`` on ``ctx`` in a new process, on random numbers.

    ``match_range`` and ``packing`` are those of the plan, ``packing`` by default a new one;
    ``optimizer`` updates the parameters, after each step or within it. With ``results`` what the
    last of ``steps`` leaves is written there: outputs, gradients, parameters and states, by numpy.
    The process imports the modules that define Custom ops here. Raises CostError where the process
    fails.
    """
    request = {
        "trace": request_of(traced, device_type=ctx.device_type),
        "traced_at": traced.graph.match_range,
        "match_range": match_range,
        "schedule": schedule.to_json(),
        "packing": None if packing is None else [packing.nbytes, packing.rows],
        "ctx": [ctx.device_type, ctx.device_id],
        "steps": steps,
        "optimizer": optimizer,
        "modules": defining_modules(),
        "results": None if results is None else str(results),
    }
    process = _process(json.dumps(request))
    if process.returncode:
        reason = f"it {ending(process.returncode)}"
        if process.returncode > 0 and process.stderr.strip():
            reason = process.stderr.strip().splitlines()[-1]
        if (missing := missing_operator(process.stderr)) is not None:
            reason = _NOT_IN_MODULE.format(missing)
        raise CostError(f"a process that trains this network on {ctx} failed: {reason}")
    return Trial(**json.loads(process.stdout.splitlines()[-1]))


def _process(request: str) -> subprocess.CompletedProcess[str]:
    """The new process, once it has ended; CostError where none can be started."""
    try:
        check_can_start()
        return subprocess.run(
            calling_main(__name__),
            input=request,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        advice = "end others, or raise the limit of processes (ulimit -u)"
        if isinstance(error, FileNotFoundError | PermissionError):
            advice = "set sys.executable to the path of the Python that has memplan"
        raise CostError(
            f"no process can be started to train this network: {error.strerror}; {advice}"
        ) from error


def main() -> None:
    """Do what the request on stdin says, for the process that the argument names, and end.

    The figures go to stdout.
    """
    if not end_with(int(sys.argv[1])):
        return
    request = json.load(sys.stdin)
    import_modules(request["modules"])
    traced = trace_again(request["trace"], match_range=request["traced_at"])
    # NumPy semantics, if the plan was made with them: this process has set none of its own.
    with mx.util.np_shape(traced.numpy_shapes):
        trial = _trained(request, traced)
    print(json.dumps(asdict(trial)), flush=True)
    # MXNet's threads sometimes abort a process that ends soon after its arrays were freed.
    os._exit(0)


@dataclass(frozen=True)
class _Arrays:
    """What a step trains on: random numbers, and the gradients that it does not make itself."""

    ctx: mx.Context
    arguments: Arrays
    states: Arrays
    gradients: Arrays

    @classmethod
    def of(cls, traced: Trace, ctx: mx.Context) -> _Arrays:
        """Those for the step of ``traced`` on ``ctx``."""
        arguments, states = random_arrays(traced, ctx)
        names = wanted(traced.grad_req)
        if traced.form.spells_out_backward:
            names = [name for name in names if traced.grad_req[name] == "add"]
        return cls(ctx, arguments, states, zero_gradients(traced, ctx, names))


@dataclass(frozen=True)
class _Step:
    """A step bound to arrays: what runs it, and the gradients that it leaves, by name.

    ``heads`` are those of its outputs, which it is given.
    """

    run: Callable[[], list[NDArray]]
    gradients: Arrays
    heads: Sequence[NDArray] = ()


def _trained(request: Mapping[str, Any], traced: Trace) -> Trial:
    """Train by the schedule of the ``request`` for ``traced``."""
    schedule = Schedule.from_json(traced.graph, request["schedule"])
    packing = _packing(traced, schedule, request["packing"])
    arrays = _Arrays.of(traced, mx.Context(*request["ctx"]))
    trained, match_range = wanted(traced.grad_req), request["match_range"]
    growth = MemoryGrowth(arrays.ctx)
    update = mx.optimizer.get_updater(mx.optimizer.create(request["optimizer"]))
    if traced.form.spells_out_backward:
        updates = OptimizerUpdates(update, {name: place for place, name in enumerate(trained)})
        options = {"match_range": match_range, "packing": packing, "updates": updates}
        step = _spelled_out_step(traced, schedule, arrays, **options)
    else:
        step = _mirrored_step(traced, schedule, arrays, match_range)

    outputs: list[NDArray] = []

    def train() -> None:
        outputs[:] = step.run()
        for place, (name, gradient) in enumerate(step.gradients.items()):
            update(place, gradient, arrays.arguments[name])
        mx.nd.waitall()

    mx.random.seed(0)
    for _ in range(UNTIMED_STEPS):
        train()
        growth.look()
    seconds = [_seconds(train) for _ in range(request["steps"])]
    growth.look()  # what is freed is not always large enough for what comes next
    if request["results"] is not None:
        parameters = {name: arrays.arguments[name] for name in trained}
        left = _results(outputs, step.gradients, parameters, arrays.states, update.states)
        np.savez(request["results"], **left)
    while sum(seconds) < LEAST_SECONDS:
        seconds.append(_seconds(train))
    # A script gives none to a loss; they are made here, as large as outputs, and stay.
    given = sum(head.size * np.dtype(head.dtype).itemsize for head in step.heads)
    return Trial(growth.nbytes - given, statistics.median(seconds))


def _seconds(train: Callable[[], object]) -> float:
    """How long a step takes that ``train`` runs."""
    begin = time.perf_counter()
    train()
    return time.perf_counter() - begin


def _packing(traced: Trace, schedule: Schedule, given: list[Any] | None) -> Packing | None:
    """The packing that is given, or one made here: before anything that the step itself takes."""
    if given is None:
        memory = load(traced.form.name).memory(traced)
        memory.nbytes(schedule)  # loads what planning loads
        return memory.packing(schedule)
    nbytes, rows = given
    return Packing.from_rows(nbytes, rows, bound_nbytes=0)


def _spelled_out_step(traced: Trace, schedule: Schedule, arrays: _Arrays, **options: Any) -> _Step:
    """An explicit or packed step; ``options`` are those of TrainExecutor."""
    executor = TrainExecutor(
        traced,
        schedule,
        ctx=arrays.ctx,
        args=arrays.arguments,
        args_grad=arrays.gradients,
        aux_states=arrays.states,
        **options,
    )
    return _Step(lambda: executor.forward(is_train=True), executor.grad_dict)


def _mirrored_step(
    traced: Trace, schedule: Schedule, arrays: _Arrays, match_range: int | None
) -> _Step:
    """A step of MXNet's executor, by the attributes of a mirror plan."""
    symbol = load(traced.form.name).realise(traced, schedule)
    with under(match_range) if match_range != current_match_range() else contextlib.nullcontext():
        requests = dict(traced.grad_req)
        executor = symbol.bind(
            arrays.ctx, arrays.arguments, arrays.gradients, requests, aux_states=arrays.states
        )
    heads = [mx.nd.ones_like(output) for output in executor.outputs]

    def run() -> list[NDArray]:
        executor.forward(is_train=True)
        executor.backward(heads)
        return list(executor.outputs)

    return _Step(run, arrays.gradients, heads)


def _results(
    outputs: list[NDArray],
    gradients: Arrays,
    parameters: Arrays,
    states: Arrays,
    updated: Mapping[int, Any],
) -> Arrays:
    """All that a step leaves, by what it is."""
    result = {f"output {place}": array for place, array in enumerate(outputs)}
    result |= {f"gradient of {name}": array for name, array in gradients.items()}
    result |= {f"parameter {name}": array for name, array in parameters.items()}
    result |= {f"state {name}": array for name, array in states.items()}
    names = list(parameters)
    for place, state in updated.items():
        parts = state if isinstance(state, list | tuple) else [state]
        for number, part in enumerate(parts):
            if isinstance(part, mx.nd.NDArray):
                result[f"state {number} of the optimizer for {names[place]}"] = part
    return {name: array.asnumpy() for name, array in result.items()}

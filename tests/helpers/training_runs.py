"""Trains a network by a schedule and by MXNet's own executor, and compares bit for bit."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from helpers.executors import ops
from memplan.memory.blocks import allocate
from memplan.memory.packing import pack
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.probe import allocated_mib
from memplan.step.schedule import Schedule

Values = dict[str, np.ndarray]


def random_values(trace: Trace, integers: Mapping[str, int] | None = None) -> Values:
    """A value for every argument and state; ``integers`` bounds those that are indices."""
    result = {}
    for name, shape in trace.shapes.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name in (integers or {}):
            value = rng.integers(0, (integers or {})[name], shape)
        elif name.endswith(("moving_var", "running_var", "gamma")):
            value = rng.uniform(0.5, 1.5, shape)
        else:
            value = rng.normal(0, 0.5, shape)
        result[name] = value.astype(trace.dtypes[name])
    return result


def _arrays(names: Sequence[str], values: Values) -> dict[str, Any]:
    return {name: mx.nd.array(values[name], dtype=values[name].dtype) for name in names}


def stock_executor(trace: Trace, values: Values) -> Any:
    """MXNet's own executor, bound to copies of ``values``."""
    symbol = trace.symbol
    arguments = symbol.list_arguments()
    wanted = [n for n in arguments if trace.grad_req[n] != "null"]
    args = _arrays(arguments, values)
    return symbol.bind(
        mx.cpu(0),
        args,
        args_grad={n: mx.nd.zeros(a.shape, dtype=a.dtype) for n, a in args.items() if n in wanted},
        grad_req=dict(trace.grad_req),
        aux_states=_arrays(symbol.list_auxiliary_states(), values),
    )


def stock_steps(trace: Trace, values: Values, steps: int = 3) -> list[Values]:
    """Everything that MXNet's own executor has computed after each of ``steps`` of SGD."""
    executor = stock_executor(trace, values)
    head_grads = _ones(executor)
    return [_step(executor, head_grads) for _ in _seeded(steps)]


def _ones(executor: Any) -> list[Any]:
    return [mx.nd.ones(o.shape, dtype=o.dtype) for o in executor.outputs]


def planned_steps(executor: TrainExecutor, steps: int = 3) -> list[Values]:
    """The same by ``executor``."""
    return [_step(executor, None) for _ in _seeded(steps)]


def differences_by_turns(
    trace: Trace, schedules: Sequence[Schedule], values: Values, steps: int = 3
) -> list[str]:
    """:func:`differences` of each schedule's training from MXNet's, for large networks.

    All train step by step in turn, so that the results of one step only are held.
    """
    stock = stock_executor(trace, values)
    planned = [bound(trace, schedule, values) for schedule in schedules]
    found = []
    for step in range(steps):
        mx.random.seed(step)
        expected = _step(stock, _ones(stock))
        for i, executor in enumerate(planned):
            mx.random.seed(step)
            gaps = differences([expected], [_step(executor, None)])
            found += [f"schedule {i}, {gap.replace('step 0', f'step {step}')}" for gap in gaps]
    return found


def _seeded(steps: int) -> range:
    mx.random.seed(7)
    return range(steps)


def _step(executor: Any, head_grads: Any) -> Values:
    executor.forward(is_train=True)
    executor.backward(head_grads)
    mx.nd.waitall()
    result = {f"output {i}": array.asnumpy() for i, array in enumerate(executor.outputs)}
    grads = {name: grad for name, grad in executor.grad_dict.items() if grad is not None}
    result |= {f"gradient of {name}": grad.asnumpy() for name, grad in grads.items()}
    result |= {name: array.asnumpy() for name, array in executor.aux_dict.items()}
    for name, grad in grads.items():
        executor.arg_dict[name][:] -= 0.01 * grad.astype(executor.arg_dict[name].dtype)
    result |= {name: array.asnumpy() for name, array in executor.arg_dict.items()}
    return result


def differences(one: Sequence[Values], other: Sequence[Values]) -> list[str]:
    """What differs after each step, and by how much; empty where all is equal bit for bit."""
    result = []
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            if a[name].tobytes() != b[name].tobytes():
                gap = np.abs(a[name].astype("f8") - b[name].astype("f8")).max()
                result.append(f"step {step}: {name} by {gap:.3g} (max {np.abs(a[name]).max():.3g})")
    return result


def bound(trace: Trace, schedule: Schedule, values: Values) -> TrainExecutor:
    """``schedule`` bound to copies of ``values``; checks MXNet's order and its allocation."""
    symbol = trace.symbol
    executor = TrainExecutor(
        trace,
        schedule,
        ctx=mx.cpu(0),
        args=_arrays(symbol.list_arguments(), values),
        aux_states=_arrays(symbol.list_auxiliary_states(), values),
    )
    description = executor.debug_str()
    lowered = lower(trace, schedule)
    assert ops(description) == expected_ops(lowered.schedule)
    if trace.form.name == "packed":
        nbytes = pack(lowered.schedule).nbytes
        assert executor.memory.nbytes == nbytes
    else:
        nbytes = allocate(lowered.schedule).reported_nbytes
    assert nbytes >> 20 == allocated_mib(description)
    return executor


def expected_ops(schedule: Schedule) -> list[tuple[str, str]]:
    """Operator and name of every step."""
    runs = [0] * len(schedule.graph.ops)
    result = []
    for op in schedule.ops:
        call = schedule.graph.ops[op]
        result.append((call.kind, f"{call.name}_again{runs[op]}" if runs[op] else call.name))
        runs[op] += 1
    return result

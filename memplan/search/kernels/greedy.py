"""A first plan in little time: where most bytes are alive, drop what is cheapest to recompute.

By seconds of recomputation per byte, as Kirisame et al. 2021 (Dynamic Tensor Rematerialization,
arXiv:2006.09616) do online, on the sequences of :mod:`memplan.search.kernels.sequence`.
"""

from __future__ import annotations

import numba
import numpy as np

from memplan.search.kernels.sequence import (
    BUDGET,
    EARLIER,
    EXCESS,
    FIRST,
    LAST,
    LENGTH,
    NBYTES,
    OP,
    READ,
    WRITER,
    insert,
    last_read,
    latest,
)

# What takes more ops to recompute is not dropped.
MOST_RECOMPUTED = 64


@numba.njit(cache=True)
def _end_of_life(model, state, tensor, step):  # type: ignore[no-untyped-def]
    """The last read of what is there of ``tensor`` at ``step``; -1 if it was never written."""
    op = model.tensors[WRITER, tensor]
    run, end = state.runs[LAST, op], state.totals[LENGTH]
    while run > step:
        end = run
        run = state.steps[EARLIER, run]
    return np.int64(-1) if run < 0 else last_read(model, state, tensor, run, end)


@numba.njit(cache=True)
def _next_read(model, state, tensor, step):  # type: ignore[no-untyped-def]
    """The first step after ``step`` that reads ``tensor``; the length if none does."""
    found = state.totals[LENGTH]
    for k in range(model.tensors[2, tensor], model.tensors[3, tensor]):
        run = state.runs[LAST, model.readers[k]]
        while run > step:
            found = min(found, run)
            run = state.steps[EARLIER, run]
    return found


@numba.njit(cache=True)
def _needed(model, state, op, step, ops):  # type: ignore[no-untyped-def]
    """Write into ``ops`` what must run for ``op`` with what is alive at ``step``; their number.

    0 if that is too much, or cannot run again.
    """
    ops[0] = op
    count, done = 1, 0
    while done < count:
        now = ops[done]
        done += 1
        for i in range(model.start[READ, now], model.start[READ, now + 1]):
            tensor = model.flat[i]
            if _end_of_life(model, state, tensor, step) >= step:
                continue
            source = model.tensors[WRITER, tensor]
            known = False
            for k in range(count):
                known |= ops[k] == source
            if known:
                continue
            if count == MOST_RECOMPUTED or not model.repeatable[source]:
                return 0
            ops[count] = source
            count += 1
    return count


@numba.njit(cache=True)
def _rank(model, state, step, ops):  # type: ignore[no-untyped-def]
    """What may be dropped at ``step``, cheapest per byte first."""
    ntensors = model.tensors.shape[1]
    tensors = np.empty(ntensors, dtype=np.int64)
    scores = np.empty(ntensors)
    count = 0
    for tensor in range(ntensors):
        op = model.tensors[WRITER, tensor]
        if not model.repeatable[op] or latest(state, op, step) < 0:
            continue
        if state.steps[OP, step] == op or _end_of_life(model, state, tensor, step) <= step:
            continue
        if _next_read(model, state, tensor, step - 1) == step:
            continue
        needed = _needed(model, state, op, step, ops)
        if needed:
            seconds = 0.0
            for k in range(needed):
                seconds += model.seconds[ops[k]]
            tensors[count] = tensor
            scores[count] = seconds / model.tensors[NBYTES, tensor]
            count += 1
    return tensors[:count][np.argsort(scores[:count])]


@numba.njit(cache=True)
def evict(model, state, most):  # type: ignore[no-untyped-def]
    """Drop at up to ``most`` peaks; False if nothing more can be done."""
    ops = np.empty(MOST_RECOMPUTED, dtype=np.int64)
    for _ in range(most):
        if state.totals[EXCESS] == 0:
            return False
        step = np.argmax(state.live[: state.totals[LENGTH]])
        before = state.live[step]
        for tensor in _rank(model, state, step, ops):
            if state.live[step] <= state.totals[BUDGET]:
                break
            gap = _next_read(model, state, tensor, step)
            needed = _needed(model, state, model.tensors[WRITER, tensor], step, ops)
            if gap >= state.totals[LENGTH] - 1:
                continue
            if needed == 0 or state.totals[LENGTH] + needed >= len(state.live):
                continue
            # in the order of their first runs, which respects all dependencies
            order = ops[:needed][np.argsort(state.runs[FIRST][ops[:needed]])]
            for op in order:
                insert(model, state, op, gap, -1)
                gap += 1
        if state.live[step] >= before:
            return False
    return True

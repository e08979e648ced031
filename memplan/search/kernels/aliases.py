"""Aliases in a sequence: with which runs of their groups they run, and the seconds that takes.

An alias costs no bytes where it is read, as it shares a buffer. Where nothing reads it, MXNet's
memory pass gives it a buffer of its own, and its seconds are for nothing.
"""

from __future__ import annotations

from memplan.search.kernels.model import ALIASED, MEMBERS
from memplan.search.kernels.state import EARLIER, LATER, LENGTH, OP, latest
from memplan.util.compiled import compiled


@compiled
def is_alias_run(model, state, op, step):  # type: ignore[no-untyped-def]
    """Does the alias ``op`` run with its group at ``step``: is it the first run, or read?"""
    if state.steps[EARLIER, step] < 0:
        return True
    later = state.steps[LATER, step]
    for k in range(model.alias_start[op], model.alias_start[op + 1]):
        if latest(state, model.alias_readers[k], later) > step:
            return True
    return False


@compiled
def alias_seconds(model, state, step):  # type: ignore[no-untyped-def]
    """The seconds of the aliases that run at ``step``."""
    group, total = state.steps[OP, step], 0.0
    for i in range(model.start[MEMBERS, group] + 1, model.start[MEMBERS, group + 1]):
        if is_alias_run(model, state, model.flat[i], step):
            total += model.op_seconds[model.flat[i]]
    return total


@compiled
def alias_seconds_around(model, state, op, step, earlier, later):  # type: ignore[no-untyped-def]
    """The seconds of the aliases at other steps that may change where ``op`` runs at ``step``.

    Those are its own runs ``earlier`` and ``later``, and the last runs of what it reads aliases of.
    """
    total = 0.0
    if earlier >= 0:
        total += alias_seconds(model, state, earlier)
    if later < state.totals[LENGTH]:
        total += alias_seconds(model, state, later)
    for i in range(model.start[ALIASED, op], model.start[ALIASED, op + 1]):
        run = latest(state, model.flat[i], step)
        if run >= 0:
            total += alias_seconds(model, state, run)
    return total

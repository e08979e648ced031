"""The ops that every way through a small step passes one after another, and what follows each.

What runs again from the first run of an op on is found by a search that begins there, with all held
that may be of use: no way can have held more. Searches that begin before it can count on that much,
and on what runs again until then. Of a chain and its backward ops every op is such a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.programs.exact_step import ExactStep, bits
from memplan.programs.moment_ranking import relatives
from memplan.step.graph import TrainingGraph

# An op is no gate if the ops that have run before it can be more sets than this.
MOST_SETS = 16


@dataclass(frozen=True)
class Gate:
    """The first run of ``op``; ``before`` are the ops that it follows, and itself, in a mask.

    ``sets`` are all the sets of ops that can have run right before it, as masks.
    """

    op: int
    before: int
    sets: tuple[int, ...]


def gates_of(graph: TrainingGraph) -> list[Gate]:
    """As many gates as follow one another, in their order."""
    ancestors, _ = relatives(graph)
    longest: dict[int, tuple[int, int | None]] = {}
    gates: dict[int, Gate] = {}
    for t in range(len(graph.ops)):
        sets = _sets_before(graph, ancestors, t)
        if sets is not None:
            before = ((longest[u][0], u) for u in longest if ancestors[t] >> u & 1)
            length, last = max(before, default=(0, None))
            longest[t] = length + 1, last
            gates[t] = Gate(t, ancestors[t] | 1 << t, sets)
    op = max(longest, key=lambda t: longest[t][0], default=None)
    result: list[Gate] = []
    while op is not None:
        result.append(gates[op])
        op = longest[op][1]
    return result[::-1]


def _sets_before(graph: TrainingGraph, ancestors: Sequence[int], t: int) -> tuple[int, ...] | None:
    """The sets of ops that can have run right before t first does; None if they are many."""
    sets = {ancestors[t] & ~(1 << t): None}
    for k in range(len(graph.ops)):
        if k != t and not ancestors[t] >> k & 1 and not ancestors[k] >> t & 1:
            needed = ancestors[k] & ~(1 << k)
            sets |= {done | 1 << k: None for done in sets if not needed & ~done}
            if len(sets) > MOST_SETS:
                return None
    return tuple(sets)


def needs_after(
    step: ExactStep, done: int, gates: Sequence[tuple[Gate, int]]
) -> list[tuple[int, int]]:
    """What :meth:`ExactStep.units_left` asks for: the gates to come, then the end."""
    after, seen = step.after(done), done
    needs = []
    for gate, units in gates:
        if not done >> gate.op & 1:
            needed = 0
            for k in bits(gate.before & ~seen):
                needed |= step.calls[k].inputs
            seen |= gate.before
            needs.append((needed & after.written, units))
    return [*needs, (after.needed, 0)]

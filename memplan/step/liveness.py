"""What is alive when: every output of every step, from the step that writes it to its last."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import accumulate, pairwise

from memplan.errors import ArgumentError
from memplan.step.schedule import Schedule
from memplan.step.simulate import Arena, replay, simulate

# An output of a step: (step, tensor).
Output = tuple[int, int]


class Role(enum.Enum):
    """What a tensor is alive for."""

    KEPT = "kept"
    """Written by the first run of a forward op, alive in the backward pass."""
    RECOMPUTED = "recomputed"
    """Written by a later run of a forward op."""
    PASSING = "in passing"
    """Written by the first run of a forward op, gone before the backward pass."""
    GRADIENT = "gradient"
    """Written by a backward op."""
    RESULT = "result"
    """Alive at the end of the step: an output of the network, or a gradient that the user gets."""


class Fate(enum.Enum):
    """What a schedule does with the largest output of a forward op."""

    KEPT = "kept"
    """A backward op reads what the first run wrote, or it is a result."""
    RECOMPUTED = "recomputed"
    """The op runs again, and no backward op reads what the first run wrote."""
    BOTH = "kept and recomputed"
    FREED = "not needed later"
    """Nothing reads it in the backward pass."""


@dataclass(frozen=True)
class Life:
    """``nbytes`` of ``tensor``, written at step ``step``, are alive to step ``last`` inclusive.

    Where another output is written over it, it is alive to the step before. An alias (reshape)
    has no life of its own: its readers prolong that of the tensor whose memory it shares.
    ``last`` is the number of steps for what is never released.
    """

    step: int
    tensor: int
    nbytes: int
    last: int
    role: Role


class _Owners(Arena):
    """An arena that notes who writes into which buffer, and when it is released."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.writers: list[list[Output]] = []
        self.released: list[int | None] = []

    def request(self, step: int, tensor: int) -> int:
        self.writers.append([(step, tensor)])
        self.released.append(None)
        return len(self.writers) - 1

    def share(self, buffer: int, step: int, tensor: int) -> None:
        graph = self.schedule.graph
        place, op = graph.position[tensor], graph.ops[self.schedule.ops[step]]
        if not any(handover.alias for handover in op.handovers if handover.output == place):
            self.writers[buffer].append((step, tensor))

    def release(self, buffer: int, step: int) -> None:
        self.released[buffer] = step


def lives(schedule: Schedule) -> tuple[Life, ...]:
    """The lives of all tensors that occupy memory, in the order in which they are written.

    At every step the bytes of those alive add up to those of
    :func:`memplan.step.simulate.simulate`.
    """
    owners = _Owners(schedule)
    replay(schedule, owners)
    first_backward = first_backward_step(schedule)
    result = []
    for writers, released in zip(owners.writers, owners.released, strict=True):
        end = len(schedule.ops) if released is None else released
        ends = [successor[0] - 1 for _, successor in pairwise(writers)] + [end]
        for (step, tensor), last in zip(writers, ends, strict=True):
            if last >= step:
                is_rerun = schedule.first_run[schedule.ops[step]] != step
                role = _role(schedule, step, last, first_backward, is_rerun=is_rerun)
                nbytes = schedule.graph.tensors[writers[0][1]].nbytes
                result.append(Life(step, tensor, nbytes, last, role))
    return tuple(sorted(result, key=lambda life: (life.step, life.tensor)))


def _role(schedule: Schedule, step: int, last: int, first_backward: int, *, is_rerun: bool) -> Role:
    if last == len(schedule.ops):
        return Role.RESULT
    if schedule.ops[step] >= schedule.graph.nforward:
        return Role.GRADIENT
    if is_rerun:
        return Role.RECOMPUTED
    return Role.KEPT if last >= first_backward else Role.PASSING


def first_backward_step(schedule: Schedule) -> int:
    """The first step that runs a backward op; the number of steps if there is none."""
    nforward = schedule.graph.nforward
    return min(schedule.first_run[nforward:], default=len(schedule.ops))


def readers(schedule: Schedule) -> dict[Output, list[int]]:
    """The steps that read each output of each step, in order; the number of steps for a head."""
    result: dict[Output, list[int]] = {}
    for step, op in enumerate(schedule.ops):
        for source, tensor in zip(schedule.reads[step], schedule.graph.ops[op].inputs, strict=True):
            steps = result.setdefault((source, tensor), [])
            if not steps or steps[-1] != step:
                steps.append(step)
    for source, tensor in zip(schedule.heads, schedule.graph.heads, strict=True):
        result.setdefault((source, tensor), []).append(len(schedule.ops))
    return result


def fates(schedule: Schedule) -> tuple[Fate, ...]:
    """What becomes of each forward op, judged by its largest output."""
    graph = schedule.graph
    first_backward, read_at = first_backward_step(schedule), readers(schedule)
    repeated_ops = set(schedule.recomputed)
    result = []
    for index, op in enumerate(graph.ops[: graph.nforward]):
        largest = max(op.outputs, key=lambda t: graph.tensors[t].nbytes, default=-1)
        is_kept = max(read_at.get((schedule.first_run[index], largest), [-1])) >= first_backward
        if index in repeated_ops:
            result.append(Fate.BOTH if is_kept else Fate.RECOMPUTED)
        else:
            result.append(Fate.KEPT if is_kept else Fate.FREED)
    return tuple(result)


def live_by_role(schedule: Schedule) -> dict[Role, list[int]]:
    """Bytes alive at each step for each role; together those of the simulation."""
    result = {role: [0] * (len(schedule.ops) + 1) for role in Role}
    for life in lives(schedule):
        result[life.role][life.step] += life.nbytes
        if life.last + 1 < len(schedule.ops):
            result[life.role][life.last + 1] -= life.nbytes
    return {role: list(accumulate(changes[:-1])) for role, changes in result.items()}


def waits(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Where outputs wait in memory: (op, first stage, last stage) for the runs of each op.

    Checkmate's S without the outputs that occupy no memory, such as gradients that are written
    into arrays of the user's: they would fill half of the picture.
    """
    stage_of = (*schedule.stage, len(schedule.graph.ops) - 1)
    last: dict[int, int] = {}
    for (step, tensor), steps in readers(schedule).items():
        if schedule.graph.tensors[tensor].nbytes:
            last[step] = max(last.get(step, 0), stage_of[steps[-1]])
    return [
        (schedule.ops[step], stage_of[step] + 1, end)
        for step, end in sorted(last.items())
        if end > stage_of[step]
    ]


@dataclass(frozen=True)
class Alive:
    """A tensor that is alive at some step.

    ``op`` wrote it at step ``since``; ``until`` is the last step at which it is alive, where
    ``reader`` runs (None, and ``until`` the number of steps, for what survives the schedule).
    ``layer`` is the forward op that it belongs to: for a gradient the one that is differentiated.
    """

    tensor: str
    op: str
    kind: str
    layer: str
    role: Role
    nbytes: int
    since: int
    until: int
    reader: str | None


def at_peak(schedule: Schedule) -> tuple[Alive, ...]:
    """What is alive at the first step that reaches the peak, the largest first.

    The bytes add up to the simulated peak.
    """
    return at_step(schedule, simulate(schedule).peak_step) if schedule.ops else ()


def at_step(schedule: Schedule, step: int) -> tuple[Alive, ...]:
    """What is alive while ``step`` runs, the largest first; ArgumentError if there is no such."""
    if step not in range(len(schedule.ops)):
        raise ArgumentError(f"there is no step {step}; the schedule has {len(schedule.ops)} steps")
    alive = [life for life in lives(schedule) if life.step <= step <= life.last]
    alive.sort(key=lambda life: -life.nbytes)
    return tuple(_alive(schedule, life) for life in alive)


def _alive(schedule: Schedule, life: Life) -> Alive:
    graph = schedule.graph
    op = graph.ops[schedule.ops[life.step]]
    ends = life.last == len(schedule.ops)
    return Alive(
        tensor=graph.tensors[life.tensor].name,
        op=op.name,
        kind=op.kind,
        layer=op.name if op.differentiates is None else graph.ops[op.differentiates].name,
        role=life.role,
        nbytes=life.nbytes,
        since=life.step,
        until=life.last,
        reader=None if ends else graph.ops[schedule.ops[life.last]].name,
    )

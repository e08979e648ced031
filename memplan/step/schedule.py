"""A schedule: which op runs at every step of a training iteration, and what each step reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from memplan.errors import ScheduleError
from memplan.step.graph import TrainingGraph
from memplan.util.files import parse_json
from memplan.util.numbers import plain, shown, total
from memplan.util.remember import remembered

FORMAT = "memplan.step.schedule/1"


@dataclass(frozen=True)
class Schedule:
    """A sequence of op executions; an op that appears again is recomputed.

    ``ops[s]`` runs at step s; ``reads[s][k]`` is the step whose execution supplies its k-th
    input, ``heads[h]`` the step that supplies the graph's h-th head. What is freed when follows
    from these (:mod:`memplan.step.simulate`). :meth:`sequence` lets every step read the latest
    execution; MXNet's mirroring needs the general form, as there an original and its copy may
    be alive together.
    """

    graph: TrainingGraph
    ops: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", _indices(self.ops))
        object.__setattr__(self, "reads", tuple(map(_indices, _listed(self.reads))))
        object.__setattr__(self, "heads", _indices(self.heads))
        if len(self.reads) != len(self.ops):
            raise ScheduleError(f"{len(self.ops)} steps, but reads for {len(self.reads)}")
        ops_so_far: set[int] = set()
        for step, (op, reads) in enumerate(zip(self.ops, self.reads, strict=True)):
            self._check_step(step, op, reads, ops_so_far)
            ops_so_far.add(op)
        if len(self.heads) != len(self.graph.heads):
            raise ScheduleError(f"{len(self.graph.heads)} heads, but sources for {len(self.heads)}")
        for head, step in zip(self.graph.heads, self.heads, strict=True):
            if not 0 <= step < len(self.ops) or self.ops[step] != self.graph.producer[head]:
                name = self.graph.tensors[head].name
                raise ScheduleError(
                    f"head {name!r} is said to come from step {shown(step)}; it does not"
                )
        missing_ops = set(range(len(self.graph.ops))) - ops_so_far
        if missing_ops:
            names = [self.graph.ops[op].name for op in sorted(missing_ops)[:5]]
            raise ScheduleError(f"{len(missing_ops)} ops never run, among them {names}")

    def _check_step(self, step: int, op: int, reads: tuple[int, ...], ops_so_far: set[int]) -> None:
        if not 0 <= op < len(self.graph.ops):
            raise ScheduleError(f"step {step}: there is no op {shown(op)}")
        call = self.graph.ops[op]
        if op in ops_so_far and not call.recomputable:
            raise ScheduleError(f"step {step}: op {call.name!r} must not run twice")
        if len(reads) != len(call.inputs):
            raise ScheduleError(
                f"step {step}: op {call.name!r} has {len(call.inputs)} inputs, not {len(reads)}"
            )
        for tensor, source in zip(call.inputs, reads, strict=True):
            if not 0 <= source < step or self.ops[source] != self.graph.producer[tensor]:
                name = self.graph.tensors[tensor].name
                raise ScheduleError(
                    f"step {step}: op {call.name!r} reads {name!r}, "
                    f"which step {shown(source)} does not supply"
                )
        for other in call.after:
            if other not in ops_so_far:
                name = self.graph.ops[other].name
                raise ScheduleError(f"step {step}: op {call.name!r} must run after {name!r}")

    @classmethod
    def trusted(
        cls,
        graph: TrainingGraph,
        ops: tuple[int, ...],
        reads: tuple[tuple[int, ...], ...],
        heads: tuple[int, ...],
    ) -> Schedule:
        """A schedule that is valid by construction: the check, which takes a while, is left out."""
        schedule = object.__new__(cls)
        schedule.__dict__.update(graph=graph, ops=ops, reads=reads, heads=heads)
        return schedule

    @classmethod
    def sequence(cls, graph: TrainingGraph, ops: Iterable[int]) -> Schedule:
        """The schedule that runs ``ops`` in this order, every step reading the latest execution.

        ScheduleError where the step cannot run so.
        """
        sequence = _indices(ops)
        latest: dict[int, int] = {}
        reads = []
        for step, op in enumerate(sequence):
            if not 0 <= op < len(graph.ops):
                raise ScheduleError(f"step {step}: there is no op {shown(op)}")
            reads.append(tuple(latest.get(graph.producer[t], -1) for t in graph.ops[op].inputs))
            latest[op] = step
        heads = tuple(latest.get(graph.producer[t], -1) for t in graph.heads)
        return cls(graph, sequence, tuple(reads), heads)

    @classmethod
    def unplanned(cls, graph: TrainingGraph) -> Schedule:
        """Every op once, in base order."""
        every_op = range(len(graph.ops))
        return remembered(graph, "unplanned", lambda: cls.sequence(graph, every_op))

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """The ops that run more than once, in base order."""
        counts = np.bincount(np.array(self.ops, dtype=int), minlength=len(self.graph.ops))
        return tuple(int(op) for op in np.flatnonzero(counts > 1))

    @cached_property
    def first_run(self) -> tuple[int, ...]:
        """For each op, the step at which it first runs."""
        first: dict[int, int] = {}
        for step, op in enumerate(self.ops):
            first.setdefault(op, step)
        return tuple(first[op] for op in range(len(self.graph.ops)))

    @cached_property
    def stage(self) -> tuple[int, ...]:
        """For each step, its stage: stage t ends with the t-th first run, the last at the end."""
        result: list[int] = []
        nfirst_runs = 0
        for step, op in enumerate(self.ops):
            result.append(min(nfirst_runs, len(self.graph.ops) - 1))
            nfirst_runs += self.first_run[op] == step
        return tuple(result)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step, recomputation included."""
        return total(self.graph.ops[op].seconds for op in self.ops)

    @property
    def overhead(self) -> float:
        """Extra seconds of recomputation / seconds of the unplanned step (0 if that is 0)."""
        unplanned = self.graph.seconds
        return (self.seconds - unplanned) / unplanned if unplanned else 0.0

    def computed(self) -> np.ndarray[Any, Any]:
        """Checkmate's R (Jain et al. 2020, section 4.2).

        ``R[t, i]``: op i runs in stage t (see :attr:`stage`).
        """
        nops, stage = len(self.graph.ops), self.stage
        runs = np.zeros((nops, nops), dtype=bool)
        runs[list(stage), list(self.ops)] = True
        return runs

    def matrices(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Checkmate's R (:meth:`computed`) and S (Jain et al. 2020, section 4.2).

        ``S[t, i]``: an output of op i computed before stage t is read in stage t or later.
        """
        nops, stage = len(self.graph.ops), self.stage
        survivals = np.zeros((nops, nops), dtype=bool)
        for step, reads in enumerate(self.reads):
            for source in reads:
                survivals[stage[source] + 1 : stage[step] + 1, self.ops[source]] = True
        for source in self.heads:
            survivals[stage[source] + 1 :, self.ops[source]] = True
        return self.computed(), survivals

    def __str__(self) -> str:
        lines = []
        for step, op in enumerate(self.ops):
            prefix = "" if self.first_run[op] == step else "again "
            call = self.graph.ops[op]
            lines.append(f"{step:6d}  {prefix}{call.name}  ({call.kind})")
        return "\n".join(lines)

    def to_json(self) -> str:
        """This schedule as JSON text (without its graph), read back by :meth:`from_json`."""
        data = {"format": FORMAT, "ops": self.ops, "reads": self.reads, "heads": self.heads}
        return json.dumps(data)

    @classmethod
    def from_json(cls, graph: TrainingGraph, text: str) -> Schedule:
        """The schedule of ``graph`` that :meth:`to_json` wrote; ScheduleError if it is not one."""
        try:
            data = parse_json(text)
            if data["format"] != FORMAT:
                raise ScheduleError(f"not a memplan schedule: format is {data['format']!r}")
            reads = tuple(tuple(r) for r in data["reads"])
            return cls(graph, tuple(data["ops"]), reads, tuple(data["heads"]))
        except ScheduleError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"not a memplan schedule: {error}") from error


def _listed(values: Any) -> tuple[Any, ...]:
    """``values`` as a tuple; ScheduleError for what is no list of any kind."""
    try:
        return tuple(values)
    except TypeError:
        raise ScheduleError(
            f"not a memplan schedule: ops, reads and heads are lists, not {shown(values)}"
        ) from None


def _indices(values: Iterable[Any]) -> tuple[int, ...]:
    """``values`` as ints of Python's, which NumPy's become; ScheduleError for what is no integer.

    JSON, in which plans are kept, takes no others.
    """
    indices = _listed(values)
    if set(map(type, indices)) <= {int}:
        return indices
    for index in map(plain, indices):
        if type(index) is not int:
            raise ScheduleError(
                f"not a memplan schedule: ops and steps are named by integers, not by "
                f"{shown(index)}"
            )
    return tuple(map(plain, indices))


def without_unread(schedule: Schedule) -> Schedule:
    """``schedule`` without runs of repeated ops whose outputs nobody reads and nobody awaits.

    What an op's next run makes anew need not have been made before. If every run is read, it is
    ``schedule`` itself.
    """
    nruns = [0] * len(schedule.graph.ops)
    for op in schedule.ops:
        nruns[op] += 1
    sources = set(schedule.heads)
    awaited_ops: set[int] = set()
    steps: list[int] = []
    for step in reversed(range(len(schedule.ops))):
        op = schedule.ops[step]
        is_awaited = op in awaited_ops and step == schedule.first_run[op]
        if step in sources or nruns[op] == 1 or is_awaited:
            sources.update(schedule.reads[step])
            awaited_ops.discard(op)
            awaited_ops.update(schedule.graph.ops[op].after)
            steps.append(step)
        else:
            nruns[op] -= 1
    if len(steps) == len(schedule.ops):
        return schedule
    steps.reverse()
    place_of = {step: place for place, step in enumerate(steps)}
    return Schedule.trusted(
        schedule.graph,
        tuple(schedule.ops[step] for step in steps),
        tuple(tuple(place_of[source] for source in schedule.reads[step]) for step in steps),
        tuple(place_of[step] for step in schedule.heads),
    )

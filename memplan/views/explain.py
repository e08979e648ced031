"""Why a tensor is kept or recomputed, and what holds the peak: in words, from a schedule."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property

from memplan.errors import ArgumentError
from memplan.planning.plan import NOT_COUNTED, Plan, in_words
from memplan.step.liveness import Alive, at_peak, first_backward_step, readers
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.nbytes import format_nbytes
from memplan.util.numbers import shown
from memplan.util.tables import text_table

# Tensors that are named where the peak is explained; the others are one line.
NAMED = 12


def memory(plan: Plan) -> str:
    """What holds the peak of a step, and what it holds beside activations."""
    parts = [
        f"{in_words(name, plan)} {format_nbytes(n)}"
        for name, n in plan.footprint.beside_activations.items()
        if n
    ]
    beside = [f"Beside activations: {', '.join(parts)}."] if parts else []
    if plan.footprint.workspace_source == NOT_COUNTED:
        beside.append("The workspace of operators is not counted.")
    return "\n\n".join(filter(None, [peak(plan.schedule), " ".join(beside)]))


def peak(schedule: Schedule) -> str:
    """What holds the peak, as text: bytes by role and by kind, and the largest tensors."""
    alive = at_peak(schedule)
    if not alive:
        return "Nothing is ever alive."
    step, total = simulate(schedule).peak_step, sum(tensor.nbytes for tensor in alive)
    op = schedule.graph.ops[schedule.ops[step]]
    lines = [
        f"The peak of live activations, {format_nbytes(total)}, is at step {step} "
        f"of {len(schedule.ops)}: {op.name} ({op.kind})."
    ]
    by_role, by_kind = Counter[str](), Counter[str]()
    for tensor in alive:
        by_role[tensor.role.value] += tensor.nbytes
        by_kind[tensor.kind] += tensor.nbytes
    for sums in (by_role, by_kind):
        shares = [(k, format_nbytes(n), f"{n / total:.1%}") for k, n in sums.most_common()]
        lines += ["", *_indented(text_table(shares, widths=(28, 10, 6)))]
    lines += ["", *_rows(alive[:NAMED])]
    if len(alive) > NAMED:
        rest = sum(tensor.nbytes for tensor in alive[NAMED:])
        lines.append(f"  and {len(alive) - NAMED} more, {format_nbytes(rest)} together")
    return "\n".join(lines)


def _rows(alive: Sequence[Alive]) -> list[str]:
    lives = [
        f"steps {tensor.since} to "
        f"{'the end' if tensor.reader is None else f'{tensor.until} ({tensor.reader})'}"
        for tensor in alive
    ]
    table = [
        (tensor.tensor, format_nbytes(tensor.nbytes), tensor.role.value, life)
        for tensor, life in zip(alive, lives, strict=True)
    ]
    return _indented(text_table(table, left=(0, 2, 3), widths=(0, 12, 10)))


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def why(schedule: Schedule, name: str, arguments: Collection[str] = ()) -> str:
    """Why the tensor ``name``, or every output of the op ``name``, is kept or recomputed.

    So are none of the ``arguments`` of the network (and its states), which is said then. Raises
    ArgumentError where there is none of the three, with names that are close.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"name must be that of an op or tensor, got {shown(name)}")
    graph = schedule.graph
    tensors = [t for t, tensor in enumerate(graph.tensors) if tensor.name == name]
    if not tensors:
        outputs = [t for op in graph.ops if op.name == name for t in op.outputs]
        tensors = [t for t in outputs if graph.tensors[t].nbytes] or outputs
    if not tensors and name in arguments:
        return (
            f"{name!r} is an argument or a state of the network, which is there all the time: no "
            "plan drops or recomputes it."
        )
    if not tensors:
        names = [op.name for op in graph.ops] + [tensor.name for tensor in graph.tensors]
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
        raise ArgumentError(f"name: there is no op and no tensor {name!r} in this network{hint}")
    reasons = Reasons(schedule)
    return "\n\n".join(reasons.of(tensor) for tensor in tensors)


class Reasons:
    """Tells of tensors of one schedule; what it looks up is collected once."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._graph = schedule.graph
        self._first_backward = first_backward_step(schedule)
        self._read_at = readers(schedule)
        self._runs: dict[int, list[int]] = {}
        for step, op in enumerate(schedule.ops):
            self._runs.setdefault(op, []).append(step)

    def of(self, tensor: int) -> str:
        """Why ``tensor`` (an index into the graph's) is kept, recomputed or freed."""
        op = self._graph.producer[tensor]
        first, *reruns = self._runs[op]
        parts = [self._opening(tensor, first)]
        if op < self._graph.nforward:
            parts.append(self._at_first(tensor, first))
            parts += [self._recomputation(tensor, step) for step in reruns]
        else:
            parts.append(self._gradient(tensor, first))
        return " ".join(part for part in parts if part)

    def _opening(self, tensor: int, first: int) -> str:
        op = self._graph.ops[self._graph.producer[tensor]]
        nbytes = self._graph.tensors[tensor].nbytes
        size = format_nbytes(nbytes) if nbytes else "no bytes of its own"
        return f"{self._graph.tensors[tensor].name} ({op.kind}, {size}), written at step {first}:"

    def _gradient(self, tensor: int, first: int) -> str:
        reads = self._read_at.get((first, tensor))
        if not self._graph.tensors[tensor].nbytes:
            return "it is written into an array that exists anyway (a parameter's gradient)."
        if not reads:
            return "nobody reads it."
        return f"a gradient, alive {self._until(reads[-1])}.{self._peak_share(tensor, first)}"

    def _at_first(self, tensor: int, first: int) -> str:
        reads = self._read_at.get((first, tensor), [])
        late_reads = [step for step in reads if step >= self._first_backward]
        if not reads:
            return "nobody reads what its first run writes."
        if not late_reads:
            is_recomputed = len(self._runs[self._graph.producer[tensor]]) > 1
            end = "." if is_recomputed else ": nothing reads it later."
            last = f"last read at step {reads[-1]} by {self._name(reads[-1])}"
            return f"freed in the forward pass ({last}){end}"
        parts = [f"kept {self._until(late_reads[-1])}.{self._peak_share(tensor, first)}"]
        if late_reads[-1] < len(self._schedule.ops):
            parts.append(self._price(tensor, late_reads[0]))
        return " ".join(part for part in parts if part)

    def _price(self, tensor: int, reader: int) -> str:
        """What it would take to recompute ``tensor`` for step ``reader``."""
        op = self._graph.ops[self._graph.producer[tensor]]
        if not op.recomputable:
            return f"It cannot be recomputed: {op.kind} must not run twice."
        ops = self._missing(tensor, reader)
        stuck = [self._graph.ops[i] for i in ops if not self._graph.ops[i].recomputable]
        if stuck:
            kind, name = stuck[0].kind, stuck[0].name
            return f"To recompute it, {name} would have to run again, and {kind} must not."
        seconds = sum(self._graph.ops[i].seconds for i in ops)
        others = "" if len(ops) == 1 else f" for {len(ops)} ops, as inputs are gone too"
        return (
            f"Recomputing it for step {reader} would cost {self._cost(seconds)}{others}"
            f"{self._rate(tensor, seconds)}."
        )

    def _missing(self, tensor: int, reader: int) -> list[int]:
        """The ops that must run again so that ``tensor`` can be recomputed before ``reader``."""
        ops: dict[int, None] = {}
        stack = [self._graph.producer[tensor]]
        while stack:
            op = stack.pop()
            if op not in ops:
                ops[op] = None
                for source in self._graph.ops[op].inputs:
                    if not self._is_there(source, reader):
                        stack.append(self._graph.producer[source])
        return list(ops)

    def _is_there(self, tensor: int, step: int) -> bool:
        runs = self._runs[self._graph.producer[tensor]]
        return any(r < step <= self._read_at.get((r, tensor), [-1])[-1] for r in runs)

    def _recomputation(self, tensor: int, rerun: int) -> str:
        op = self._graph.ops[self._graph.producer[tensor]]
        cost = f"at {self._cost(op.seconds)}"
        reads = self._read_at.get((rerun, tensor), [])
        if not reads:
            return (
                f"The op runs again at step {rerun}, {cost}, but this output of it is not needed."
            )
        text = f"Recomputed at step {rerun}, {cost}, for {self._name(reads[0])}"
        if reads[0] < len(self._schedule.ops) and self._is_again(reads[0]):
            text += ", itself recomputed"
        before = [r for r in self._runs[self._graph.producer[tensor]] if r < rerun]
        last_read = max(max(self._read_at.get((r, tensor), [r])) for r in before)
        if last_read < rerun and self._is_wanted_backward(tensor):
            at_peak = ", nor at the peak" if last_read < self._peak_step < rerun else ""
            text += (
                f"; its {format_nbytes(self._graph.tensors[tensor].nbytes)} are not held between "
                f"step {last_read} and step {rerun}{at_peak}"
            )
        return text + "."

    def _is_again(self, step: int) -> bool:
        return self._runs[self._schedule.ops[step]][0] < step

    def _is_wanted_backward(self, tensor: int) -> bool:
        """Does a backward op read it, so that it would be kept without a plan?"""
        return any(op >= self._graph.nforward for op in self._graph.readers[tensor])

    def _peak_share(self, tensor: int, first: int) -> str:
        nbytes = self._graph.tensors[tensor].nbytes
        last = self._read_at[first, tensor][-1]
        if not nbytes or not self._peak_nbytes:
            return ""
        if first <= self._peak_step <= last:
            return f" It is {nbytes / self._peak_nbytes:.1%} of the peak (step {self._peak_step})."
        return f" It does not count at the peak (step {self._peak_step})."

    def _cost(self, seconds: float) -> str:
        step = self._graph.seconds
        return f"{seconds * 1e3:.3g} ms" + (f" ({seconds / step:.2%} of the step)" if step else "")

    def _rate(self, tensor: int, seconds: float) -> str:
        """Bytes spared a millisecond, beside those that the plan does spare."""
        mine = self._graph.tensors[tensor].nbytes
        if not seconds or not mine:
            return ""
        text = f", {format_nbytes(int(mine / seconds / 1e3))} spared a ms"
        if self._spared_a_second:
            rate = format_nbytes(int(self._spared_a_second / 1e3))
            text += f" (what is recomputed: {rate} a ms on average)"
        return text

    def _until(self, step: int) -> str:
        if step == len(self._schedule.ops):
            return "to the end of the step, as a result"
        return f"to step {step}, for {self._name(step)}"

    def _name(self, step: int) -> str:
        if step == len(self._schedule.ops):
            return "the user"
        return self._graph.ops[self._schedule.ops[step]].name

    @cached_property
    def _peak_step(self) -> int:
        return simulate(self._schedule).peak_step

    @cached_property
    def _peak_nbytes(self) -> int:
        return simulate(self._schedule).peak_nbytes

    @cached_property
    def _spared_a_second(self) -> float:
        """Bytes that a backward op wants and that are recomputed / seconds of recomputation."""
        nbytes, seconds = 0, 0.0
        for op, runs in self._runs.items():
            for rerun in runs[1:]:
                seconds += self._graph.ops[op].seconds
                for tensor in self._graph.ops[op].outputs:
                    if (rerun, tensor) in self._read_at and self._is_wanted_backward(tensor):
                        nbytes += self._graph.tensors[tensor].nbytes
        return nbytes / seconds if seconds else 0.0

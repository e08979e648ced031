"""Checkmate's integer program over the whole training graph, tensor by tensor.

Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020
(arXiv:1910.02653), section 4, with retention per tensor instead of per op. Schedules advance the
frontier (section 4.3): stage t ends with the first execution of op t; before it, each earlier op
may run once more, in base order. For op i and tensor a of op p:

- R[t, i]: op i runs in stage t.  R[t, t] = 1;  R[t, i] = 0 for i > t.
- S[t, a]: tensor a is carried into stage t.  S[t, a] = 0 for t <= p;  S[T, head] = 1.
- R[t, j] <= R[t, p] + S[t, a] for every input a of j (eq. 1b);
- S[t + 1, a] <= S[t, a] + R[t, p] (eq. 1c).
- A[t, k, a]: tensor a is alive at step k of stage t, the step at which op k runs if it does. For
  p > k it is S[t, a]; else it is the largest of S[t + 1, a] and R[t, j] of the readers j >= k of
  a, and for p = k also of R[t, k]. This is U with FREE (eqs. 2 to 6) solved for what is left: no
  free variables are needed that could free what is not there (F <= R).
- the sum of nbytes[a] * A[t, k, a] is at most the budget, for every t and k (eq. 7).

Minimised are the seconds of recomputation. Only S is integral: given S, the least R is.

Hand-overs: an output of op k that may take over the buffer of an input c saves its bytes by at
most R[t, k] and by at most 1 - (c is alive after step k). Tensors that share a buffer by an alias
count once, as the largest of their A.

Exact reductions, none of which loses the optimum:

- ops that must not run twice, and backward ops unless asked for, have R[t, i] = 0 for t > i, and
  tensors that nobody can read in stage t or later have S[t, a] = 0;
- tensors that are certainly read later and cannot be recomputed, or have no bytes, have S = 1;
- in the first stages, as long as all tensors that may be read again fit the budget together,
  nothing is recomputed and S = 1;
- in the last stages, from where on all that may be read again fits together, whatever has to be
  recomputed is so in the first of these stages; in the others R = 0 and S is 0 or 1;
- memory rows are added when a solution violates them: a program with some rows is a relaxation,
  so its bound holds, and its optimum is optimal if an exact replay finds it within the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from memplan.programs.solver import LEEWAY, SCALE, TOLERANCE, Program
from memplan.search.buffers import Buffers, carried_tensors, last_stages
from memplan.search.rematerialize import repeatable, retaining
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# Of graphs with more pairs of ops than this the program is too large to be solved in a minute.
PAIRS = 1_000_000

# A memory row that is exceeded by less than this, in budgets, is left to the exact replay.
SLACK = LEEWAY / SCALE

# A quantity is the number of a variable (int) or a constant (float).
Quantity = int | float
Values = Sequence[float]


def _summed(addends: Iterable[tuple[float, Quantity]]) -> tuple[dict[int, float], float]:
    """factor * quantity, summed: the factors of variables, and a constant."""
    terms: dict[int, float] = defaultdict(float)
    constant = 0.0
    for factor, quantity in addends:
        if isinstance(quantity, int):
            terms[quantity] += factor
        else:
            constant += factor * quantity
    return terms, constant


def _value(quantity: Quantity, values: Values) -> float:
    return values[quantity] if isinstance(quantity, int) else quantity


class StageProgram:
    """A relaxation of the program, with the memory rows added so far, built in ``program``.

    Raises TimeoutError if it is not built before ``stop``: it has of the order of a variable for
    every pair of ops.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        budget_nbytes: int,
        program: Program,
        *,
        recompute_backward: bool = False,
        stop: Stop,
    ) -> None:
        self.graph = graph
        self.stop = stop
        self.budget_nbytes = budget_nbytes
        self.program = program
        self.scale = SCALE / graph.seconds if graph.seconds else 1.0
        self.repeatable = tuple(
            is_repeatable and any(graph.tensors[a].nbytes for a in op.outputs)
            for op, is_repeatable in zip(
                graph.ops, repeatable(graph, backward=recompute_backward), strict=True
            )
        )
        self.last_run, self.last_stage, self.last_first_read = last_stages(graph, self.repeatable)
        self.first, self.last = self._stages_that_matter()
        self.buffers = Buffers(graph)
        self.rows: set[tuple[int, int]] = set()
        self._run: dict[tuple[int, int], int] = {}
        self._carried: dict[tuple[int, int], int] = {}
        self._most: dict[tuple[int, int], int] = {}
        # The other variables in the order in which they were made, and how to compute them.
        self._derived: list[tuple[int, Callable[[Values], float]]] = []
        self._add_variables()
        # For every stage, and for the end, the tensors that are there whatever is decided, and
        # those that cannot be recomputed: the schedule frees them when nobody reads them any more.
        self._sure = [
            frozenset(
                a
                for a, p in enumerate(graph.producer)
                if self._surely_carried(t, a)
                or (not self.repeatable[p] and p < t <= self.last_stage[a])
            )
            for t in range(len(graph.ops) + 1)
        ]
        for t in range(self.first, self.last + 1):
            self._add_stage(t)
            self.add_row(t, t)

    def _stages_that_matter(self) -> tuple[int, int]:
        """The first stage in which not all that may be read again fits, and the one after the last.

        An op's outputs count together, as executing it again writes them all.
        """
        graph = self.graph
        nops = len(graph.ops)
        change = [0] * (nops + 1)
        for i, op in enumerate(graph.ops):
            nbytes = sum(graph.tensors[a].nbytes for a in op.outputs)
            change[i] += nbytes
            change[min(nops, max([i, *(self.last_stage[a] for a in op.outputs)]) + 1)] -= nbytes
        held_nbytes, stages = 0, []
        for t in range(nops):
            held_nbytes += change[t]
            if held_nbytes > self.budget_nbytes:
                stages.append(t)
        return (stages[0], min(stages[-1] + 1, nops - 1)) if stages else (nops, nops - 1)

    # R and S ----------------------------------------------------------------------------------

    def run(self, t: int, i: int) -> Quantity:
        """R[t, i]."""
        return 1.0 if t == i else self._run.get((t, i), 0.0)

    def carried(self, t: int, a: int) -> Quantity:
        """S[t, a]."""
        number = self._carried.get((t, a))
        return float(self._surely_carried(t, a)) if number is None else number

    def _surely_carried(self, t: int, a: int) -> bool:
        p = self.graph.producer[a]
        if not p < t <= self.last_stage[a]:
            return False
        if t <= self.first or not self.graph.tensors[a].nbytes:
            return True
        return t <= self.last_first_read[a] and (t > self.last or not self.repeatable[p])

    def _add_variables(self) -> None:
        graph = self.graph
        for i, op in enumerate(graph.ops):
            self._check_clock()
            if self.repeatable[i]:
                for t in range(max(i, self.first) + 1, min(self.last_run[i], self.last) + 1):
                    self._run[t, i] = self.program.variable(self.scale * op.seconds)
        for a in range(len(graph.tensors)):
            self._check_clock()
            begin = max(graph.producer[a], self.first) + 1
            for t in range(begin, min(self.last_stage[a], self.last) + 1):
                if not self._surely_carried(t, a):
                    self._carried[t, a] = self.program.variable(integer=True)

    def _check_clock(self) -> None:
        if self.stop.is_over():
            raise TimeoutError

    # Rows -------------------------------------------------------------------------------------

    def _add_stage(self, t: int) -> None:
        """Rows (1b) and (1c) of stage ``t``."""
        self._check_clock()
        graph = self.graph
        for j in range(t + 1):
            running = self.run(t, j)
            if running != 0.0 or isinstance(running, int):
                for a in dict.fromkeys(graph.ops[j].inputs):
                    self._at_most(running, (self.run(t, graph.producer[a]), self.carried(t, a)))
        for a, p in enumerate(graph.producer):
            if p < t:
                self._at_most(self.carried(t + 1, a), (self.carried(t, a), self.run(t, p)))

    def _at_most(self, left: Quantity, right: Sequence[Quantity]) -> None:
        """The row left <= sum of right, unless it holds in any case."""
        if isinstance(left, float) and left <= 0.0:
            return
        if any(isinstance(q, float) and q >= 1.0 for q in right):
            return
        terms, constant = _summed([(1.0, left), *((-1.0, quantity) for quantity in right)])
        self.program.at_most(terms, -constant)

    def _largest(self, quantities: Sequence[Quantity]) -> Quantity:
        """A quantity that is at least each of ``quantities``, and in an optimum no more."""
        result: Quantity = 0.0
        for q in quantities:
            if isinstance(q, float) or isinstance(result, float):
                constant, other = (q, result) if isinstance(q, float) else (result, q)
                result = constant if constant >= 1.0 else other
            elif q != result:
                result = self._larger(min(q, result), max(q, result))
        return result

    def _larger(self, one: int, other: int) -> int:
        if (one, other) not in self._most:
            number = self.program.variable()
            self._most[one, other] = number
            self._derived.append((number, lambda values: max(values[one], values[other])))
            self._at_most(one, (number,))
            self._at_most(other, (number,))
        return self._most[one, other]

    def _alive(self, t: int, k: int, a: int, *, after: bool = False) -> Quantity:
        """A[t, k, a]; with ``after``, how much of it survives step k."""
        p = self.graph.producer[a]
        if p > k:
            return self.carried(t, a)
        needs = [self.carried(t + 1, a)]
        needs += [
            self.run(t, j)
            for j in reversed(self.graph.readers[a])
            if k <= j <= t and not (after and j == k)
        ]
        if p == k and not after:
            needs.append(self.run(t, k))
        return self._largest(needs)

    def add_row(self, t: int, k: int) -> bool:
        """Demand that what is alive at step ``k`` of stage ``t`` fits; False if it is there."""
        if (t, k) in self.rows:
            return False
        self.rows.add((t, k))
        unit = SCALE / max(1, self.budget_nbytes)
        quantities: list[tuple[float, Quantity]] = []
        for nbytes, members in self.buffers.classes:
            alive = [self._alive(t, k, a) for a in members if self.graph.producer[a] <= t]
            quantities.append((nbytes * unit, self._largest(alive)))
        for nbytes, sources in self.buffers.takeovers[k]:
            quantities.append((-nbytes * unit, self._savings(t, k, sources)))
        terms, constant = _summed(quantities)
        room = unit * self.budget_nbytes + LEEWAY - constant
        if terms or room < 0.0:
            self.program.at_most(terms, room)
        return True

    def _savings(self, t: int, k: int, sources: Sequence[Sequence[int]]) -> Quantity:
        """How much of an output of op k is written into inputs that die at it."""
        running = self.run(t, k)
        survivors = [
            self._largest([self._alive(t, k, a, after=True) for a in members])
            for members in sources
        ]
        if running == 0.0 and isinstance(running, float):
            return 0.0
        if all(q == 1.0 and isinstance(q, float) for q in survivors):
            return 0.0
        number = self.program.variable()

        def savings(values: Values) -> float:
            deaths = sum(1.0 - _value(q, values) for q in survivors)
            return max(0.0, min(_value(running, values), deaths))

        self._derived.append((number, savings))
        self._at_most(number, (running,))
        terms, constant = _summed((1.0, q) for q in (number, *survivors))
        self.program.at_most(terms, len(survivors) - constant)
        return number

    def forbid(self, values: Values) -> None:
        """Exclude exactly this S (an exact replay found it over the budget)."""
        ones = [n for n in self._carried.values() if values[n] > 0.5]
        terms = dict.fromkeys(self._carried.values(), -1.0) | dict.fromkeys(ones, 1.0)
        self.program.at_most(terms, len(ones) - 1.0)

    # Solutions --------------------------------------------------------------------------------

    def seconds(self, bound: float) -> float:
        """Seconds of a whole step that a bound of the program proves, tolerances taken off."""
        return self.graph.seconds + max(0.0, bound - TOLERANCE * max(1.0, bound)) / self.scale

    def contents(self, values: Values, threshold: float = 0.5) -> list[set[int]]:
        """For every stage, and for the end, the tensors a with S[t, a] > ``threshold``."""
        result = [set(sure) for sure in self._sure]
        for (t, a), number in self._carried.items():
            if values[number] > threshold:
                result[t].add(a)
        return result

    def carried_values(self, values: Values) -> list[float]:
        """The values of all variables S."""
        return [values[number] for number in self._carried.values()]

    def schedule(self, values: Values) -> Schedule:
        """The schedule of these S, with the least R."""
        return retaining(self.graph, self.contents(values))

    def start_from(self, schedule: Schedule) -> None:
        """Give the solver a first solution; ``schedule`` advances the frontier in base order."""
        self.program.start_from(self._values(schedule))

    def _values(self, schedule: Schedule) -> list[float]:
        values = [0.0] * len(self.program.variables)
        for t, tensors in enumerate(carried_tensors(schedule)):
            for a in tensors:
                if (t, a) in self._carried:
                    values[self._carried[t, a]] = 1.0
        # In the stages without decisions the program recomputes elsewhere than the schedule.
        runs = self.schedule(values).computed()
        for (t, i), number in self._run.items():
            values[number] = float(runs[t, i])
        for number, compute in self._derived:
            values[number] = compute(values)
        return values

    # Memory of a solution ---------------------------------------------------------------------

    def add_violated(self, values: Values) -> int:
        """Add, for every stage, the row that ``values`` violate most; returns how many."""
        nrows = 0
        for t in range(self.first, self.last + 1):
            steps = [
                (nbytes, k)
                for k, nbytes in self._live_nbytes(t, values)
                if nbytes > (1.0 + SLACK) * self.budget_nbytes and (t, k) not in self.rows
            ]
            if steps:
                nrows += self.add_row(t, max(steps)[1])
        return nrows

    def _live_nbytes(self, t: int, values: Values) -> Iterator[tuple[int, float]]:
        """Step and bytes alive for every op that runs in stage ``t`` by ``values``, backwards."""
        graph, buffers = self.graph, self.buffers
        alive = [_value(self.carried(t + 1, a), values) for a in range(len(graph.tensors))]
        total = sum(n * max(alive[a] for a in members) for n, members in buffers.classes)

        def put(a: int, value: float) -> float:
            nbytes, members = buffers.classes[buffers.class_of[a]]
            before = max(alive[m] for m in members)
            alive[a] = value
            return nbytes * (max(alive[m] for m in members) - before)

        for k in range(t, -1, -1):
            running = _value(self.run(t, k), values)
            call = graph.ops[k]
            if running > SLACK:
                savings = 0.0
                for nbytes, sources in buffers.takeovers[k]:
                    deaths = sum(1.0 - max(alive[m] for m in members) for members in sources)
                    savings += nbytes * max(0.0, min(running, deaths))
                for a in (*call.inputs, *call.outputs):
                    if buffers.class_of[a] >= 0:
                        total += put(a, max(alive[a], running))
                yield k, total - savings
            for a in call.outputs:
                if buffers.class_of[a] >= 0:
                    total += put(a, _value(self.carried(t, a), values))

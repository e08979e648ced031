"""The gradients of parameters around a step, which autograd may write into beside it.

A parameter's gradient is in one of three memories, and the array that scripts have of it follows:

- The step's, from :meth:`Gradients.hand_over` on: the step computes it there, and autograd writes
  there, too, where it is used beside the step.
- None, from :meth:`Gradients.lend` on, between the halves of a step, for it is still to be
  computed. What is lent is *withheld* (:mod:`memplan.mxnet.train.arrays.withheld`): nobody may read
  it before autograd has written there.
- Its own, before the first step, and from :meth:`Gradients.leave` on, as the memory of the step
  goes, or :meth:`Gradients.follow`, as another step runs there, which does not compute it.

Each of these marks the parameter anew for autograd, which then knows it by another number. A loss
reads it by the number of when that was recorded, and its gradient goes to the array of then. In

    with autograd.record():
        outputs = net(x)  # lend()
        loss = function(outputs) + 0.1 * (w.data() ** 2).sum()  # reads w by its number of now
    loss.backward()

autograd writes 0.2 w into what was lent. The second half gets it from :meth:`Gradients.beside`, and
adds it; ``hand_over()`` makes the sum, in the memory of the step, the gradient of w. Of a loss that
was recorded in between and is differentiated only then, autograd still writes into what was lent:
:class:`Late` brings that to the parameter. One recorded before ``lend()`` is refused, for where it
would write has no memory, or that of another step (:meth:`Gradients.check`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mxnet import autograd

from memplan.errors import UsageError
from memplan.mxnet.realise.own_autograd import mark_variables
from memplan.mxnet.train.arrays.array_memory import is_written_by_graphs, without_memory
from memplan.mxnet.train.arrays.held import Held
from memplan.mxnet.train.arrays.marks import Earlier, Marks
from memplan.mxnet.train.arrays.read_by_loss import ReadByLoss, name_of, number_of
from memplan.mxnet.train.arrays.withheld import note_computed, note_unless_zeros, shown, was_fresh

NDArray = Any
Parameter = Any


class Gradients:
    """The gradients of the parameters to which a plan is bound, on one context."""

    def __init__(self, held: Sequence[Held], earlier: Earlier) -> None:
        """``earlier`` are of all whose steps run in the same memory."""
        self._written = [h for h in held if h.request == "write"]
        self._added = [h for h in held if h.request == "add"]
        # By which autograd knows the parameters: now, since they were lent arrays, and before.
        self._marks = self._marks_lent = Marks()
        self._numbers_added: Sequence[int] = []
        self._earlier = earlier
        self._is_lent = False

    def are_current(self) -> bool:
        """Are those to which steps add still the parameters' own, and were others not replaced?"""
        are_same = all(h.parameter._grad[h.place] is h.array for h in self._added)
        return are_same and not any(h.is_replaced() for h in self._written)

    def are_orphaned(self) -> bool:
        """Has a parameter another gradient now, or none, so that scripts alone may hold these?"""
        return any(h.is_orphaned() for h in self._written)

    def written(self) -> list[NDArray]:
        """The parameters whose gradients autograd has written and would overwrite."""
        return [h.data for h in self._written if h.data._fresh_grad]

    def follow(self, last: Gradients) -> None:
        """Before a step in the memory of the ``last`` one: what that computed alone moves out.

        MXNet keeps the gradients of parameters that a step does not read.
        """
        # There autograd would write into the memory of the step.
        self._earlier += [last._marks_lent, last._marks]
        # One class for each gradient serves steps of all shapes.
        kinds = {(id(h.parameter), id(h.data)): h.kind for h in last._written}
        for held in self._written:
            held.kind = held.kind or kinds.get((id(held.parameter), id(held.data)))
        ours = {id(held.data) for held in self._written}
        for held in [] if last._is_lent else last._written:
            if held.is_of_parameter() and held.is_ours() and id(held.data) not in ours:
                held.move_out()

    def leave(self) -> None:
        """Before the memory of the step goes: the parameters keep their gradients outside of it.

        A further step can then be bound in the place of that memory. If that fails, nothing is
        lost.
        """
        for held in self._written:
            if not held.is_kept():
                held.list_when_lent = None  # or the gradients of before would keep the memory
            if not self._is_lent:
                held.leave_replaced()
            if not held.is_of_parameter():  # autograd has a gradient there by what it had before
                held.data, held.kind = held.data.detach(), None
            elif not self._is_lent and held.is_ours():
                held.move_out()
            held.array = without_memory(held.array)

    def lend(self) -> None:
        """Give the parameters arrays for gradients, of which none has memory before it is used."""
        foreign = _marks_of([h for h in self._written if not h.is_ours()])
        self._earlier += [self._marks_lent, self._marks, foreign]
        self._is_lent = True  # Ctrl-C may come within what follows
        self._note_fresh()
        self._mark([h.to_lend() for h in self._written])
        self._marks_lent = self._marks
        self._numbers_added = [number_of(h.data) for h in self._added]
        for held in (*self._written, *self._added):
            held.list_when_lent = held.parameter._grad

    def check_marks(self) -> None:
        """UsageError where a script has attached other arrays for gradients since :meth:`lend`."""
        lent = zip(self._marks_lent.numbers, self._written, strict=True)
        ours = [pair for pair in lent if pair[1].is_ours()]
        for number, held in (*ours, *zip(self._numbers_added, self._added, strict=True)):
            if held.is_kept() and number_of(held.data) != number:
                raise UsageError(
                    f"attach_grad of parameter {held.parameter.name!r} was called between the call "
                    f"of a planned block and backward, which would write no gradient there; call "
                    f"it before the block, or leave it out: p.grad() is the gradient"
                )

    def let_go(self) -> bool:
        """Leave gradients to parameters that got other arrays since :meth:`lend`; are there such?

        What MXNet computes of a loss that was recorded before goes where the old ones were.
        """
        kept = {place: h for place, h in enumerate(self._written) if h.is_kept()}
        added = [h for h in self._added if h.is_kept()]
        are_gone = (len(kept), len(added)) != (len(self._written), len(self._added))
        if are_gone:
            numbers = [self._marks_lent.numbers[place] for place in kept]
            self._marks_lent = self._marks = Marks(
                numbers, [h.parameter.name for h in kept.values()]
            )
            self._written, self._added = list(kept.values()), added
        return are_gone

    def beside(self) -> dict[str, NDArray]:
        """The gradients that autograd has written into arrays that are lent, to be added to."""
        held = [h for h in self._written if h.data._fresh_grad]
        return {h.parameter.name: h.parameter._grad[h.place].as_nd_ndarray() for h in held}

    def withhold(self) -> None:
        """Let nobody read arrays that are lent, but for those that autograd writes."""
        for held in self._written:
            held.withhold()
        self.show_written()

    def show_written(self) -> None:
        """Of the arrays that are lent let those be read into which autograd has written."""
        for held in self._written if self._is_lent else []:
            if held.data._fresh_grad:
                note_computed(held.parameter)
                held.show()

    def hand_over(self) -> Late:
        """Make the arrays in which the gradients will be those of the parameters.

        What these were before is where a loss that was recorded until now writes.
        """
        late = Late([], [])
        if self._is_lent:
            late = self._replace_lent()
        elif not all(h.is_ours() for h in self._written):
            self._replace_others()
        self._is_lent = False
        return late

    def _replace_lent(self) -> Late:
        """Make the arrays of the step the gradients in the place of those that were lent."""
        # What somebody has written is withheld no longer.
        unused = [h.kind and type(h.current) is h.kind.type for h in self._written]
        # Backward of autograd, if it is used beside this step, must write there too.
        before = self._mark([h.array for h in self._written])
        late = Late(self._marks_lent.numbers, list(zip(self._written, before, strict=True)))
        for (held, array), is_spare in zip(late.before, unused, strict=True):
            held.spare = array if is_spare else None
        return late

    def _replace_others(self) -> None:
        """Make the arrays of the step the gradients in the place of the parameters' own."""
        self._earlier += [self._marks, _marks_of(self._written)]
        self._note_fresh()
        before = self._mark([h.array for h in self._written])
        for held, array in zip(self._written, before, strict=True):
            note_unless_zeros(held.parameter, array)

    @contextlib.contextmanager
    def computed(self) -> Iterator[None]:
        """Around what computes them: an optimizer may take them only where that has not failed.

        What was added before a step that only begins stays, for an optimizer to take.
        """
        every = [held.data for held in (*self._written, *self._added)]
        for data in every:
            data._fresh_grad = False
        yield
        for data in every:
            data._fresh_grad = True
        for held in self._written:
            held.was_fresh = False
            note_computed(held.parameter)

    def _note_fresh(self) -> None:
        """Note, before autograd forgets it, which gradients a trainer has still to use."""
        for held in self._written:
            held.was_fresh |= bool(held.data._fresh_grad) or was_fresh(held.current)

    def _mark(self, arrays: Sequence[NDArray]) -> list[NDArray | None]:
        """Let autograd write gradients to these ``arrays``; those that the parameters had."""
        before = [held.give(array) for held, array in zip(self._written, arrays, strict=True)]
        data = [held.data for held in self._written]
        if data:
            gradients = [held.parameter._grad[held.place] for held in self._written]
            mark_variables(data, gradients, "write")
            first = number_of(data[0])
            numbers = range(first, first + len(data))
            self._marks = Marks(numbers, [held.parameter.name for held in self._written])
            if number_of(data[-1]) != numbers[-1]:  # another thread marked some meanwhile
                self._marks = _marks_of(self._written)
        return before

    def reads(self, read: ReadByLoss) -> bool:
        """Does a loss read the parameters as they are marked now?"""
        every = (self._marks.numbers, self._numbers_added)
        return any(number in numbers for number in read.variables for numbers in every)

    def numbered(self) -> Iterator[tuple[int, Held]]:
        """By which number autograd knows each parameter whose gradient is written now."""
        return zip(self._marks.numbers, self._written, strict=True)

    def all_numbered(self) -> Iterator[tuple[int, Held]]:
        """The same, and of those to which a step adds."""
        yield from self.numbered()
        yield from zip(self._numbers_added, self._added, strict=True)

    def names_added(self, read: ReadByLoss) -> list[str]:
        """The parameters that a loss reads and to whose gradients those of a step are added."""
        added = zip(self._numbers_added, self._added, strict=True)
        return [held.parameter.name for number, held in added if number in read.variables]

    def check(self, read: ReadByLoss) -> None:
        """UsageError for a loss that reads parameters as they were before the step began."""
        if any(marks.read_by(read) for marks in self._earlier):
            raise UsageError(
                "the loss reads a parameter of a planned block past the block, and did so "
                "before the block was called, where its gradient has no memory now; call the "
                "block first, and then compute the penalty, or whatever it is, from p.data()"
            )

    def check_asked(self, read: ReadByLoss, asked: Collection[str]) -> None:
        """UsageError where a loss reads a parameter as it was marked before, ``asked`` by now.

        MXNet would find no way from the loss to what is asked, or leave out what it reads so.
        """
        former = [marks for marks in (*self._earlier, self._marks_lent) if marks is not self._marks]
        names = {name for marks in former for name in marks.read_by(read)}
        for held in self._written if names else []:
            if held.parameter.name in names and name_of(held.data) in asked:
                raise UsageError(
                    f"mx.autograd.grad does not reach parameter {held.parameter.name!r}: a planned "
                    f"step has begun or ended since the loss was recorded, and either marks the "
                    f"parameters anew for autograd; differentiate the loss before that, or record "
                    f"it after"
                )


def _marks_of(every: Sequence[Held]) -> Marks:
    numbers = [number_of(held.data) for held in every]
    return Marks(numbers, [held.parameter.name for held in every])


@dataclass
class Late:
    """Where autograd writes the gradients of what was recorded between the halves of a step."""

    numbers: Sequence[int]
    before: list[tuple[Held, NDArray | None]]

    def is_awaited(self) -> bool:
        """Is there a graph still of what was recorded then?"""
        return any(is_written_by_graphs(a) for _, a in self.before if a is not None)

    def written_by(self, read: ReadByLoss) -> list[tuple[Held, NDArray]]:
        """The gradients that a loss would write there, of parameters that are still the same."""
        if not self.numbers:
            return []
        places = [self.numbers.index(n) for n in read.variables if n in self.numbers]
        found = [self.before[place] for place in places]
        return [(held, a) for held, a in found if a is not None and held.is_of_parameter()]


@contextlib.contextmanager
def passed_on(late: Iterable[Late], read: ReadByLoss) -> Iterator[None]:
    """Around a ``backward``: gradients of what was recorded before reach the parameters."""
    pairs = [pair for one in late for pair in one.written_by(read)]
    fresh = [held.data._fresh_grad for held, _ in pairs]
    for held, _ in pairs:
        held.data._fresh_grad = False
    try:
        yield
    except BaseException:
        for (held, _), was_fresh in zip(pairs, fresh, strict=True):
            held.data._fresh_grad = was_fresh
        raise
    with autograd.pause():
        for held, array in pairs:
            gradient = shown(held.current)
            if held.data._fresh_grad:
                gradient += array
            else:
                array.copyto(gradient)
            held.data._fresh_grad = True

"""A step of which the first half has run, until the caller's loss is differentiated.

What becomes of it, as :class:`State` names it:

    BEGUN ─ finish() ─▶ FINISHED, or RETAINED
      └──── leave() ──▶ LEFT

``TrainStep.unfinished`` has those that are BEGUN, one on a context. PlannedCalls has the last of
the others: ``backward`` through what these returned is an error, and what was recorded between the
halves of one that is finished may still be differentiated (:attr:`FirstHalf.late`).
"""

from __future__ import annotations

import contextlib
import enum
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.train.arrays.array_memory import is_recorded_elsewhere
from memplan.mxnet.train.arrays.constants import reads_only_constants
from memplan.mxnet.train.arrays.gradients import Late
from memplan.mxnet.train.arrays.nesting import leaves
from memplan.mxnet.train.arrays.read_by_loss import ReadByLoss, is_read, number_of
from memplan.mxnet.train.arrays.writes import Writes, warn_of_inputs, warn_of_outputs
from memplan.mxnet.train.blocks.loss_calls import OUTPUT
from memplan.mxnet.train.blocks.sums_of_loss import Item, warn_of_sums
from memplan.util.numbers import shown

if TYPE_CHECKING:
    from memplan.mxnet.train.bound_step import BoundStep

NDArray = Any

# Of so many losses of one step that differ in what they read it is looked at how MXNet adds up.
MOST_LOSSES = 64


class State(enum.Enum):
    """What has become of a step whose first half has run."""

    BEGUN = "its second half is still to run"
    FINISHED = "its second half has run, or was about to when something failed"
    RETAINED = "finished by a backward that kept its graph, through which another may come"
    LEFT = "its second half will never run: another step begins in its place, or backward failed"


@dataclass(eq=False)
class FirstHalf:
    """A step whose first half has run.

    ``pairs`` are outputs of which gradients are wanted, with the arrays for these; ``losses`` those
    of loss operators, which need none, and ``constants`` those by which no parameter gets a
    gradient, though MXNet goes through them into the block. ``names`` are those that autograd has
    for the outputs, if these are asked for. ``inputs`` are those that it was given, by name,
    ``returned`` those outputs that the second half reads, by place, ``thread`` is that in which it
    has run. Does MXNet run the block ``as_graph``?
    """

    bound: BoundStep
    pairs: list[tuple[NDArray, NDArray]]
    losses: list[NDArray]
    constants: list[NDArray]
    names: Sequence[str | None]
    as_graph: bool
    inputs: InitVar[dict[str, NDArray]]
    returned: InitVar[dict[int, NDArray]]
    thread: threading.Thread = field(default_factory=threading.current_thread)
    state: State = State.BEGUN
    #: Has a loss that was differentiated read a constant? MXNet goes into the block there, too.
    is_reached_by_constants: bool = False
    #: Where autograd writes what was recorded between the halves; None until it is finished.
    late: Late | None = None

    def __post_init__(self, inputs: dict[str, NDArray], returned: dict[int, NDArray]) -> None:
        self._nupdates = self.bound.nupdates()
        self._inputs = set(inputs)
        self._returned = {f"{OUTPUT}{place}": place for place in returned}
        self._unmoved: list[str] = []
        outputs = dict(zip(self._returned, returned.values(), strict=True))
        self.writes = Writes(self.bound.read_again | inputs | outputs)  # those of the script's

    @property
    def is_finished(self) -> bool:
        return self.state in (State.FINISHED, State.RETAINED)

    def is_reached(self) -> bool:
        """Has autograd written the gradient of an output, since the first half or the second?"""
        by_gradients = any(array._fresh_grad for array in self._variables())
        return by_gradients or self.is_reached_by_constants

    def is_read(self, read: ReadByLoss) -> bool:
        """Will autograd go through it?"""
        return self.reads_constants(read) or self.is_gone_through(read)

    def is_gone_through(self, read: ReadByLoss) -> bool:
        """Will autograd write gradients of its outputs, or train by its loss operators?"""
        return any(is_read(array, read) for array in self._variables())

    def check(self, read: ReadByLoss) -> None:
        """UsageError for a loss that reads it and parameters as no step can serve them."""
        bound = self.bound
        bound.gradients.check(read)
        if not self.is_read(read):
            return
        self._check_parameters()
        self._check_losses(read)
        self._unmoved = self._asked_unmoved(read)
        bound.gradients.check_marks()
        reads_parameters = bound.gradients.reads(read)
        self._warn_of_sums(read, reads_parameters)
        for parameter in bound.statistics() if reads_parameters else []:
            if is_read(parameter.data(bound.executor.ctx), read):
                raise UsageError(
                    f"the loss calls a layer of a planned block past the block, too, and MXNet "
                    f"would update {parameter.name!r} in the order in which the graph of the loss "
                    f"has both calls, which memplan does not know; record and differentiate the "
                    f"two one after the other, with grad_req='add', or train the block unplanned"
                )

    def _check_losses(self, read: ReadByLoss) -> None:
        """UsageError where the step would train by a loss operator that no loss is computed of."""
        behind = list(zip(self.names, self.bound.network.losses, strict=False))
        reached = {loss for name, losses in behind if name in read.names for loss in losses}
        unread = {loss for _, losses in behind for loss in losses} - reached
        if unread:
            _, name, op = min(unread)
            raise UsageError(
                f"the loss does not read op {name!r} ({op}) of the planned block, whose gradient "
                f"may need none of its output: MXNet computes no gradient of it then, and a "
                f"planned step does, as a block that is one graph. Call hybridize(inline_limit=0), "
                f"which does not help where the block has a forward of its own, or return what the "
                f"op reads, and compute it outside of the block"
            )

    def _asked_unmoved(self, read: ReadByLoss) -> list[str]:
        """The statistics that the step moves and MXNet does not; UsageError for another order."""
        statistics = self.bound.network.statistics
        places = {name: place for place, name in enumerate(self.names)}
        outputs = [places[name] for name in read.names if name in places]
        return statistics.unmoved(outputs) if statistics is not None else []

    def _warn_of_sums(self, read: ReadByLoss, reads_parameters: bool) -> None:
        """Warn, once, where MXNet adds up gradients in another order.

        It does with those of outputs only where it does not run the block as a graph. One loss may
        have them added up so, and another one not.
        """
        bound = self.bound
        reads_outputs = not self.as_graph and any(bound.reads.outputs)
        kinds = ((True, reads_parameters), (False, reads_outputs))
        asked = {of_parameters for of_parameters, is_asked in kinds if is_asked}
        new = asked - bound.are_warned_of
        if not new:
            return
        numbers = [number_of(array) for array, _ in self.pairs]
        every = list(self._items(numbers))
        added = bound.gradients.names_added(read) if True in new else []
        names = {item.number: item.name for item in every}
        variables = tuple(names.get(number) for number in read.variables)
        loss = hash((self.as_graph, variables, tuple(added), tuple(read.order())))
        if loss in bound.losses_seen or len(bound.losses_seen) == MOST_LOSSES:
            return
        bound.losses_seen.add(loss)
        items = [item for item in every if item.is_parameter in new]
        bound.are_warned_of |= warn_of_sums(
            items, numbers, read.readers(), as_graph=self.as_graph, added=added
        )

    def _items(self, numbers: Sequence[int]) -> Iterator[Item]:
        """Parameters, and outputs of these ``numbers``, that block and loss may both read."""
        reads, names = self.bound.reads, self.bound.network.symbol.list_outputs()
        for number, held in self.bound.gradients.numbered():
            name = held.parameter.name
            yield Item(name, number, reads.parameters.get(name, 0), is_parameter=True)
        for place, number in zip(self.bound.outputs.paired, numbers, strict=True):
            yield Item(names[place], number, reads.outputs[place], is_parameter=False)

    def _check_parameters(self) -> None:
        """UsageError where what is recomputed would read parameters that were written since."""
        now, again = self.bound.nupdates(), self.bound.read_again
        updated = {name for name in again if now[name] != self._nupdates[name]}
        written = self.writes.written()
        if written & self._inputs:
            warn_of_inputs()
        if not self.bound.returned.beside.isdisjoint(self._written_outputs()):
            warn_of_outputs()
        for name in updated | (written - self._inputs - set(self._returned)):
            how = "was updated by a trainer" if name in updated else "was written"
            raise UsageError(
                f"parameter {name!r} {how} between the call of a planned block and backward, "
                f"which would recompute by the new values what was computed by the old ones; "
                f"finish the step before that, or take strategy='store_all', which recomputes "
                f"nothing"
            )

    def _written_outputs(self) -> dict[int, NDArray]:
        """The outputs that a script has written, and the second half reads, by their places."""
        written = self.writes.written().intersection(self._returned)
        return {self._returned[name]: self.writes.array(name) for name in written}

    def _take_back(self) -> None:
        """Have the second half read what a script has written into outputs, as MXNet's ops do.

        But for what others read, too: they would compute otherwise than MXNet's.
        """
        beside, written = self.bound.returned.beside, self._written_outputs()
        self.bound.take_back({k: array for k, array in written.items() if k not in beside})

    def nterms_of(self, name: str) -> int:
        """How many gradients of parameter ``name`` MXNet has from the block."""
        return 1 if self.as_graph else self.bound.reads.parameters.get(name, 1)

    def belongs_elsewhere(self) -> bool:
        """Has it run in another thread, which may still differentiate it?"""
        return self.thread is not threading.current_thread() and self.thread.is_alive()

    def reads_constants(self, read: ReadByLoss) -> bool:
        """Does a loss read outputs by which no parameter gets a gradient?"""
        return any(is_read(array, read) for array in self.constants)

    def is_awaited(self) -> bool:
        """Is it still to be asked where a ``backward`` comes?

        Until it is finished while anybody else has its outputs, be it a graph that was recorded,
        and later if that was retained; then while one has parameters as they were between the
        halves.
        """
        if self.late is not None and self.late.is_awaited():
            return True
        is_over = self.state is State.FINISHED
        outputs = [] if is_over else [*self._variables(), *self.constants]
        return any(map(is_recorded_elsewhere, outputs))

    def forget(self) -> None:
        """Let it be as if autograd had written nothing."""
        for array in self._variables():
            array._fresh_grad = False
        self.is_reached_by_constants = False

    def _variables(self) -> list[NDArray]:
        return [array for array, _ in self.pairs] + self.losses

    def leave(self) -> None:
        """It will run no second half, or has: writes into what that reads matter no longer."""
        if self.state is State.BEGUN:
            self.state = State.LEFT
        self.writes.end()

    def finish(self, *, retains_graph: bool = False) -> None:
        """Run the second half; what autograd has not written is zeros."""
        self.state = State.RETAINED if retains_graph else State.FINISHED
        with autograd.pause():
            for array, gradient in self.pairs:
                if not array._fresh_grad:
                    gradient[:] = 0
            self.forget()
            self._take_back()
            with self.bound.keeping(self._unmoved):
                self.late = self.bound.second_half()
        self.writes.end()


def _share_parameters(halves: Iterable[FirstHalf]) -> bool:
    """Do two of them compute gradients of one parameter?"""
    seen: set[int] = set()
    for half in halves:
        own = {id(held.data) for _, held in half.bound.gradients.all_numbered()}
        if not seen.isdisjoint(own):
            return True
        seen |= own
    return False


def warn_of_shared(halves: Iterable[FirstHalf], read: ReadByLoss) -> None:
    """Warn, once, where MXNet adds up gradients that several of the ``halves`` compute otherwise.

    A sum of two is one in any order: of the steps of two blocks that MXNet runs as graphs, say, and
    with nothing past them that reads the parameter.
    """
    every = list(halves)
    if len(every) < 2 or not _share_parameters(every):
        return
    reached = [half for half in every if half.is_read(read)]
    if len(reached) < 2 or all(half.bound.is_warned_of_shared for half in reached):
        return
    past = set(read.variables)
    nblocks: Counter[int] = Counter()
    nterms: Counter[int] = Counter()
    parameters = {}
    for half in reached:
        for number, held in half.bound.gradients.all_numbered():
            key, name = id(held.data), held.parameter.name
            if key not in parameters:
                nterms[key] += held.request == "add"
            parameters[key] = name
            nblocks[key] += 1
            nterms[key] += half.nterms_of(name) + (number in past)
    names = [name for key, name in parameters.items() if nblocks[key] > 1 and nterms[key] > 2]
    if names:
        for half in reached:
            half.bound.is_warned_of_shared = True
        warnings.warn(
            f"planned blocks share {', '.join(names[:3])}{' and others' if names[3:] else ''}, and "
            f"add their gradients in the order in which they were planned, behind those of what "
            f"reads them past the blocks, where MXNet adds all in the order of the loss: the last "
            f"bits may differ. Make one block of all that reads them to have them equal",
            stacklevel=2,
        )


def heads_of(loss: Any, head_grads: Any) -> tuple[list[NDArray], list[NDArray | None] | None]:
    """The arrays of a ``loss``, and their gradients, as ``autograd.backward`` takes them.

    ArgumentError for what is no array, and where there is not a gradient for each.
    """
    heads = list(leaves(loss))
    if not heads:
        raise ArgumentError(
            f"loss must be an array of MXNet's or a list of them, got {shown(loss)}; compute it "
            f"under autograd.record() from what forward() returned"
        )
    one = (mx.nd.NDArray, np.ndarray)
    several = isinstance(head_grads, Iterable) and not isinstance(head_grads, one)
    grads = None if head_grads is None else list(head_grads) if several else [head_grads]
    for name, values in (("loss", heads), ("head_grads", grads or [])):
        for value in values:
            if not (isinstance(value, mx.nd.NDArray) or (name == "head_grads" and value is None)):
                raise ArgumentError(
                    f"{name} must be an array of MXNet's or a list of them, got {shown(value)}; "
                    f"compute the loss under autograd.record() from what forward() returned"
                )
    if grads is not None and len(grads) != len(heads):
        raise ArgumentError(
            f"head_grads are {len(grads)}, and losses {len(heads)}; give one for each loss"
        )
    return heads, grads


def differentiate(
    backward: Callable[[], None], read: ReadByLoss, halves: Iterable[FirstHalf]
) -> None:
    """Call ``backward`` of the losses that were ``read``, which may reach any of the ``halves``."""
    by_constants = [half for half in halves if half.reads_constants(read)]
    if not (by_constants and reads_only_constants(read)):  # MXNet would find nothing to do
        backward()
    for half in by_constants:
        half.is_reached_by_constants = True


@contextlib.contextmanager
def overwriting(halves: Iterable[FirstHalf]) -> Iterator[None]:
    """Around a ``backward``: where it finishes steps it overwrites gradients, as MXNet's does.

    Whatever autograd wrote before, of a penalty or of another block, is not added to theirs.
    """
    written = [(half, half.bound.gradients.written()) for half in halves]
    for _, arrays in written:
        for array in arrays:
            array._fresh_grad = False
    try:
        yield
    finally:
        for half, arrays in written:
            for array in [] if half.is_finished else arrays:
                array._fresh_grad = True
            half.bound.gradients.show_written()

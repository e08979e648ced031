"""A block that trains by a plan in the loop that its user has: called, and differentiated."""

from __future__ import annotations

import inspect
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.train.blocks.called_with_symbols import check_block
from memplan.mxnet.train.planned_calls import PlannedCalls
from memplan.mxnet.train.taking_turns import TURN
from memplan.mxnet.train.train_step import TrainStep
from memplan.util.arguments import with_named_options

Block = Any

# What a planned block has, and a copy of it has not. The class of the user's block may have
# attributes and methods of any other name.
STEP, PLAN = "planned_step", "_memplan_planned"

# What a planned block has no use for, and why.
_NOT_TAKEN = {
    "trainer": "the loop calls trainer.step itself",
    "loss": (
        "the loop computes it of what the block returns; for one within the step take "
        "TrainStep(block, loss), which is called in place of autograd.record() and backward()"
    ),
    "keep_outputs": "it returns its outputs to the loop in every step",
    "optimizer": "the loop's trainer has it; leave room for its states by reserve='200MiB'",
}


@with_named_options
def planned(block: Block, **options: Any) -> Block:
    """``block`` itself, which from now on trains by a plan, in a loop that stays as it is.

    ``options`` are those of :class:`TrainStep`: ``budget``, ``realisation`` and the like. Called
    under ``autograd.record()``, the block runs the forward part of its plan;
    ``loss.backward()`` or ``autograd.backward(losses)`` of a loss computed from what it returned
    runs the rest. Everything else, inference included, is as before; ``block.planned_step`` is the
    TrainStep. For this ``NDArray.backward``, ``mx.autograd.backward`` and ``mx.contrib.autograd``'s
    are wrapped. Where a script holds gradients in other arrays than ``p.grad()``, or gives the
    parameters arrays that it computes of others, the block trains unplanned, with a warning.

    Raises what TrainStep raises; UsageError where the graph of a step is differentiated twice, or
    that of an earlier call on a context after a later one, for both would need memory that is gone,
    where a loss reads parameters as they were before the call, or calls a layer with statistics
    besides, for ``backward(train_mode=False)``, and where ``mx.autograd.grad`` is asked for
    gradients of its parameters that it cannot reach: through the block, or of a loss recorded
    before its call or ``backward``; ArgumentError for a block that has trained by a plan of other
    options (before the first step these replace the others), and for a trainer, an optimizer, a
    loss, ``keep_outputs`` and what is no option. Threads that call the block or ``backward`` wait
    for each other, and each of them trains on contexts of its own. A copy of the block is not
    planned.
    """
    check_block(block)
    _check_options(options)
    options.pop("optimizer", None)  # which a TrainStep has by its trainer
    if PLAN in vars(block):
        return _planned_again(block, options)
    if STEP in vars(block) or hasattr(type(block), STEP):
        raise ArgumentError(
            f"block {block.name!r} has a {STEP} of its own, the attribute under which a planned "
            f"block has its TrainStep; give that of {type(block).__name__} another name"
        )
    if "forward" in vars(block):
        raise ArgumentError(
            f"forward of block {block.name!r} was replaced on the object, which would go past its "
            f"plan; derive a class with that forward from {type(block).__name__}"
        )
    step = _step(block, options)
    kind = type(block)
    # Attributes of its own, not of a base beside ``kind``, which would change the layout of a class
    # whose first base is an ABC: Python lets no object change to a class of another layout.
    own = {name: vars(_PlannedBlock)[name] for name in ("forward", "__init__", "__reduce_ex__")}
    own |= {"__module__": kind.__module__, "_memplan_unplanned": kind}
    if kind.__call__ is not mx.gluon.Block.__call__:
        own["__call__"] = _PlannedBlock.__call__
    # Not by a call of the metaclass: one of the script's may register the classes that it makes.
    block.__class__ = type.__new__(_like_its_base(type(kind)), kind.__name__, (kind,), own)
    return _with_step(block, step, options)


def _planned_again(block: Block, options: dict[str, Any]) -> Block:
    """``block``, which is planned, by these ``options`` where none of other ones gave a plan."""
    if block._memplan_planned.options == options:  # a cell of a notebook runs again
        return block
    with TURN:  # another thread may be searching the first plan
        before: PlannedCalls = block._memplan_planned
        if before.step.plans:
            raise ArgumentError(
                f"block {block.name!r} is planned already, by other options ({before.options}); "
                f"to train it by these, make the block anew, load its parameters and plan that one"
            )
        return _with_step(block, _step(block, options), options)


def _step(block: Block, options: dict[str, Any]) -> TrainStep:
    step = TrainStep(block, **options)
    step.graphs.of_calls = True
    return step


def _with_step(block: Block, step: TrainStep, options: dict[str, Any]) -> Block:
    block.planned_step, block._memplan_planned = step, PlannedCalls(block, step, options)
    return block


def _check_options(options: dict[str, Any]) -> None:
    """ArgumentError for those that there are not, or say what the loop does, or has, itself."""
    known = [*inspect.signature(TrainStep).parameters][1:]
    taken = [name for name in known if name not in _NOT_TAKEN]
    for name in options:
        if name not in (*taken, *_NOT_TAKEN):
            raise ArgumentError(f"planned has no option {name!r}; it has {', '.join(taken)}")
    for name, reason in _NOT_TAKEN.items():
        value = options.get(name)
        if value is not None and value is not False:
            raise ArgumentError(f"a planned block needs no {name}: {reason}")


def _like_its_base(metaclass: Any) -> Any:
    """One whose classes have for instances those of their base, whose making no class hears of.

    Gluon asks for the instances where a child is replaced: a layer that is not planned takes the
    place of one that is.
    """

    def mro(cls: Any) -> list[type]:
        own, *bases = metaclass.mro(cls)
        return [own, _Unheard, *bases] if _is_of_planned(cls) else [own, *bases]

    asked = {
        "__instancecheck__": lambda cls, block: isinstance(block, cls._memplan_unplanned),
        "__subclasscheck__": type.__subclasscheck__,  # ABCMeta's asks what its __new__ has made
        "mro": mro,
    }
    return type(metaclass.__name__, (metaclass,), asked)


def _is_of_planned(kind: type) -> bool:
    """Is it the class of a planned block itself, and not one that a script derives from it?"""
    return "_memplan_unplanned" in vars(kind)


class _Unheard:
    """Stands between the class of a planned block and that of the script's.

    Python tells the next class in line of a new one, by ``__init_subclass__``. One of the script's
    may register its models so, or want arguments, and knows the block's class already.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        if not _is_of_planned(cls):
            super().__init_subclass__(**options)


class _PlannedBlock:
    """What the class of a planned block has instead of what its class has."""

    _memplan_unplanned: type[Block]
    _memplan_planned: PlannedCalls

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._memplan_planned.forward(self, args, named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._memplan_planned.calls.run(self, args, named)

    def __init__(self, *args: Any, **options: Any) -> None:
        """Make another block of the class, as HybridSequential makes a slice: it is not planned."""
        self.__class__: Any = self._memplan_unplanned
        self.__class__.__init__(self, *args, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of what a copy is made, or a pickle: of a block that is not planned.

        The step of this one trains the parameters of this one.
        """
        kind: Any = self._memplan_unplanned
        made, args, *rest = kind.__reduce_ex__(self, protocol)
        args = tuple(kind if arg is type(self) else arg for arg in args)
        if made.__name__ == "__newobj__":  # pickle makes no other class by it than the block's
            made = kind.__new__
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: part for name, part in rest[0].items() if name not in (STEP, PLAN)}
        return made, args, *rest

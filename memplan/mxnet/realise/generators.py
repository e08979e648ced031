"""Whose random numbers are drawn: MXNet has generators for every thread.

:func:`mxnet.random.seed` seeds those of the thread that calls it. An executor of MXNet's keeps
those of the thread that has bound it, whichever runs it; a call of an operator, and so a packed
step, takes those of the thread that makes it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable

from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import depends_on_mode, draws_in_training, is_random


class Generators:
    """Those of which something draws, if it ``draws`` at all, in the place of an executor.

    With ``are_kept`` they are those of this thread, as of one that binds; else of any that runs.
    """

    def __init__(self, draws: bool, *, are_kept: bool) -> None:
        self._draws = draws
        self._thread = threading.current_thread() if are_kept else None
        self._are_told = False

    def are_of(self, thread: threading.Thread) -> bool:
        """Would a run in this thread draw what ``thread`` is to draw, if anything?"""
        return not self._draws or thread is (self._thread or threading.current_thread())

    def check(self, binding: threading.Thread) -> None:
        """Warn, once, where MXNet's executor would draw as the thread that is ``binding`` it."""
        if self._are_told or self.are_of(binding):
            return
        self._are_told = True
        drawing = self._thread or threading.current_thread()
        warnings.warn(
            f"random numbers are those of the thread {drawing.name!r}, where an executor of "
            f"MXNet's draws those of the thread that has bound it, {binding.name!r}: masks of "
            f"Dropout, and whatever else is drawn, are others. Bind, and reshape, in the thread "
            f"that trains and infers. Or take realisation='explicit', and run the first training "
            f"step of all shapes, and the first inference, in the thread that binds",
            stacklevel=4,
        )


def draws(nodes: Iterable[Node], *, in_training: bool = True) -> bool:
    """Does one of ``nodes`` draw random numbers of a thread's, be it in training or in inference?

    A fused recurrent layer, and what a loop draws in its body, do not count: on a CPU the one has
    numbers of its own, and MXNet calls the other anew, in the thread that runs the executor.
    """
    return any(
        is_random(node)
        and draws_in_training(node)
        and node.forward is None
        and (in_training or not depends_on_mode(node))
        for node in nodes
    )

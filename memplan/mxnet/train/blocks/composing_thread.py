"""What is put into blocks while a thread composes their network, and is for that thread alone.

A script may run the same blocks with arrays in other threads at the time: inference beside training
takes no turns. These find what is there without a plan.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mxnet.gluon.utils import HookHandle

Hook = Callable[..., Any]


def same_thread() -> Callable[[], bool]:
    """A function that says whether it is called in the thread that calls this."""
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread


def called_in_it(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` where this thread calls it, ``elsewhere`` where others do."""
    is_here = same_thread()
    return lambda *args, **options: (function if is_here() else elsewhere)(*args, **options)


class Hooks(OrderedDict[int, Hook]):
    """Hooks to stand in the place of ``others`` of a block, whose dict no thread sees change.

    The thread that makes them finds none.
    """

    def __init__(self, others: OrderedDict[int, Hook]) -> None:
        super().__init__()
        self._others = others
        self._is_here = same_thread()
        _attach_to_others()

    def values(self) -> Any:
        return () if self._is_here() else self._others.values()

    def __bool__(self) -> bool:
        return bool(self.values())

    def __setitem__(self, key: int, hook: Hook) -> None:
        self._others[key] = hook


@functools.cache
def _attach_to_others() -> None:
    """From now on what detaches a hook knows the dict that stays, not the :class:`Hooks` before it.

    It has a weak reference, which is dead when these are gone, and would then detach nothing.
    """
    attach = HookHandle.attach

    @functools.wraps(attach)
    def attach_there(handle: HookHandle, hooks: OrderedDict[int, Hook], hook: Hook) -> None:
        while isinstance(hooks, Hooks):
            hooks = hooks._others
        attach(handle, hooks, hook)

    HookHandle.attach = attach_there

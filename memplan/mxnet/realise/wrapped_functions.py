"""MXNet's functions, wrapped under every name that a script has for them.

``from mxnet.autograd import backward`` binds the function itself, so that nobody finds a wrapper
there that takes the function's place in the module later. Hence the function stays, and gets
another code, which calls the wrapper; the wrapper calls a copy that has the code of before. For
others it is still MXNet's function: equal to itself, pickled by its name, and by ``__wrapped__``
:mod:`inspect` finds the signature and the source.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def wrap(owner: Any, name: str, wrapper_of: Callable[[Function], Function]) -> None:
    """Have every call of the function ``name`` of ``owner``, a module or a class, go to a wrapper.

    ``wrapper_of`` makes it for a function that does what this one has done. Another library may
    have wrapped that before: in the same way, and its code is then called where MXNet's would be,
    or by a function with a closure in its place, which nobody knows to call MXNet's. The wrapper
    takes the place of such a function, and names that scripts have bound before go past both.
    """
    function = getattr(owner, name)
    if not isinstance(function, types.FunctionType) or function.__closure__:
        setattr(owner, name, wrapper_of(function))
        return
    own = copy_of(function)
    # The code comes last: other threads call the function meanwhile, and the old code reads none of
    # what the new one needs.
    functools.update_wrapper(function, own)
    function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "_wrapper": wrapper_of(own)}
    function.__code__ = _call_wrapper.__code__


def copy_of(function: Function) -> Function:
    """Another function that does the same, whatever becomes of ``function``.

    It is that itself where it is none of Python's, into which nobody can put a wrapper.
    """
    if not isinstance(function, types.FunctionType):
        return function
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del vars(copy)["__wrapped__"]
    return copy


def is_of_wrapped(frame: types.FrameType) -> bool:
    """Is it a function that is wrapped? MXNet's module is that of the frame, too."""
    return frame.f_code is _call_wrapper.__code__


def _call_wrapper(*args: Any, _wrapper: Function, **options: Any) -> Any:
    """What a wrapped function does: the wrapper is a default, as its code has no other place."""
    return _wrapper(*args, **options)

"""Networks from where people keep them: Symbol JSON, Gluon exports, functions of modules."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import ArgumentError
from memplan.mxnet.plan_file import is_plan
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.arguments import check_names, complete_grad_req
from memplan.mxnet.trace.nnvm import shape_is_known
from memplan.mxnet.trace.said import said
from memplan.mxnet.trace.user_operators import missing_operator, unregistered_operator
from memplan.mxnet.train.arrays.nesting import dtype_name, leaves, of_semantics
from memplan.mxnet.train.blocks.named_parameters import named_parameters

# Whole numbers; a letter stands for what is searched for, such as the batch size.
Shapes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Network:
    """A network with the arguments of :func:`memplan.plan` that go with it.

    ``files`` were read for it. ``gluon``: it is a block of a running program, which trains by plans
    of whole steps only; ``has_loss``: with a loss beside it.
    """

    symbol: mx.sym.Symbol
    shapes: Shapes
    type_dict: Mapping[str, str] | None
    grad_req: Mapping[str, str] | str | None
    files: tuple[Path, ...]
    gluon: bool
    has_loss: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of :func:`memplan.plan`."""
        return {"type_dict": self.type_dict, "grad_req": self.grad_req, **self.shapes}


def load_network(
    source: str,
    *,
    shapes: Shapes,
    type_dict: Mapping[str, str] | None = None,
    requests: Sequence[tuple[str, str]] = (),
) -> Network:
    """The network that ``source`` names.

    ``source`` is the path of a Symbol's JSON, or "module:function" of a function without arguments
    that returns a Symbol, a Gluon block, or a pair of a block and its loss. Where parameters lie
    beside the JSON, as Gluon's export writes them, the network must fit them and takes their
    dtypes. A block is called with the inputs that ``shapes`` names, in this order; a loss with its
    output and the inputs that are called "...label".

    ``requests`` are pairs of a pattern of argument names and what it is to have: "write", "add" or
    "null"; the last one that fits counts, without any the argument has what Module (or the block's
    parameter) asks for. Raises ArgumentError for anything that cannot be used.
    """
    if source.endswith(".json"):
        network = _from_file(Path(source), shapes, type_dict)
    elif re.fullmatch(r"[\w.]+:[\w.]+", source):
        network = _from_function(source, shapes, type_dict)
    else:
        raise ArgumentError(
            f"the network {source!r} is neither the path of a Symbol (*.json) nor a function "
            "(module:function)"
        )
    if not requests:
        return network
    grad_req = complete_grad_req(network.symbol, network.shapes, network.grad_req)
    for pattern, request in requests:
        names = [name for name in grad_req if fnmatchcase(name, pattern)]
        if not names:
            raise ArgumentError(f"grad_req: no argument of the network is called {pattern!r}")
        grad_req |= dict.fromkeys(names, request)
    return dataclasses.replace(network, grad_req=grad_req)


def context(text: str) -> mx.Context:
    """The context called "cpu", "gpu", "gpu:1" or "gpu(1)"; ArgumentError for anything else."""
    match = re.fullmatch(r"(cpu|gpu)(?::([0-9]{1,4})|\(([0-9]{1,4})\))?", text)
    if match is None:
        raise ArgumentError(f"there is no context {text!r}; it is 'cpu', 'gpu', or such as 'gpu:1'")
    return mx.Context(match[1], int(match[2] or match[3] or 0))


def _from_file(path: Path, shapes: Shapes, type_dict: Mapping[str, str] | None) -> Network:
    try:
        symbol = symbol_json.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (MXNetError, LookupError, TypeError, ValueError) as error:
        missing = missing_operator(error)
        if missing is not None:
            raise ArgumentError(
                f"{str(path)!r} has the Custom op {missing!r}, which is not defined here; instead "
                "of the file name a function that returns the network (module:function), of a "
                "module that defines the op or imports what does"
            ) from error
        if (unknown := unregistered_operator(error)) is not None:
            raise ArgumentError(
                f"{str(path)!r} has the operator {unknown!r}, which this MXNet does not have; if a "
                "library brings it, give instead of the file name a function that returns the "
                "network (module:function), of a module that calls mx.library.load first"
            ) from error
        if is_plan(path):
            raise ArgumentError(
                f"{str(path)!r} is a plan; name the network that it is for (of the commands only "
                "'memplan explain' reads plans)"
            ) from error
        raise ArgumentError(
            f"{str(path)!r} is no Symbol: MXNet cannot read it{_because(error)}. Such a file is "
            "written by symbol.save(path), module.save_checkpoint(prefix, epoch) or "
            "block.export(prefix)"
        ) from error
    params_path = _params_beside(path)
    if params_path is None:
        return Network(symbol, shapes, type_dict, None, (path,), gluon=False)
    params = _load_params(params_path)
    _check_fit(symbol, shapes, params, params_path)
    type_dict = _with_dtypes(symbol, type_dict, params)
    return Network(symbol, shapes, type_dict, None, (path, params_path), gluon=False)


def _because(error: Exception) -> str:
    """Which op MXNet cannot read, if it says so: one of another version."""
    reason = said(error)
    return f" ({reason})" if isinstance(error, MXNetError) and "perator" in reason else ""


def _params_beside(path: Path) -> Path | None:
    """The parameters saved with the Symbol in ``path``: those of the last epoch."""
    prefix = path.name.removesuffix(".json").removesuffix("-symbol")
    numbered = re.compile(re.escape(prefix) + r"-\d{4,}\.params")
    paths = [other for other in path.parent.glob("*.params") if numbered.fullmatch(other.name)]
    return max(paths, key=lambda other: (len(other.name), other.name), default=None)


def _load_params(path: Path) -> dict[str, mx.nd.NDArray]:
    """The arrays in ``path`` by name, without their prefixes "arg:" and "aux:"."""
    try:
        arrays = mx.nd.load(str(path))
    except MXNetError as error:
        raise ArgumentError(f"{str(path)!r} holds no parameters: MXNet cannot read it") from error
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"the parameters in {str(path)!r} cannot be read, as MXNet reads only files whose name "
            "is UTF-8; rename them"
        ) from error
    if not isinstance(arrays, dict):
        raise ArgumentError(f"{str(path)!r} holds arrays without names, not a network's parameters")
    return {re.sub("^(arg|aux):", "", name): array for name, array in arrays.items()}


def _check_fit(
    symbol: mx.sym.Symbol, shapes: Shapes, params: Mapping[str, mx.nd.NDArray], path: Path
) -> None:
    """ArgumentError if ``shapes`` make a parameter another shape than it has in ``path``.

    A letter in them, for a batch size that is searched for, counts as 1.
    """
    check_names(symbol, shapes, {})
    ones = {n: tuple(s if isinstance(s, int) else 1 for s in dims) for n, dims in shapes.items()}
    arguments, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    try:
        argument_shapes, _, state_shapes = symbol.infer_shape_partial(**ones)
    except MXNetError:
        return  # planning says what is wrong with the shapes
    for name, shape in zip((*arguments, *states), (*argument_shapes, *state_shapes), strict=True):
        if name in params and shape_is_known(shape) and tuple(shape) != params[name].shape:
            raise ArgumentError(
                f"with these input shapes {name!r} is {tuple(shape)}, but {params[name].shape} in "
                f"{str(path)!r}; give the shapes that those parameters are for, or move that file "
                "away to plan for new ones"
            )


def _with_dtypes(
    symbol: mx.sym.Symbol, type_dict: Mapping[str, str] | None, params: Mapping[str, Any]
) -> Mapping[str, str] | None:
    """``type_dict`` with the dtypes of the ``params``, where they are not all float32."""
    dtypes = {name: dtype_name(parameter.dtype) for name, parameter in params.items()}
    if not set(dtypes.values()) - {"float32"}:
        return type_dict
    arguments = symbol.list_arguments()
    return {name: dtype for name, dtype in dtypes.items() if name in arguments} | dict(
        type_dict or {}
    )


def _from_function(source: str, shapes: Shapes, type_dict: Mapping[str, str] | None) -> Network:
    result = _call(source)
    if isinstance(result, mx.sym.Symbol):
        return Network(result, shapes, type_dict, None, _files_of(source), gluon=False)
    block, loss = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(block, mx.gluon.HybridBlock):
        raise ArgumentError(
            f"{source} returned {_kind(result)}; it must return a Symbol, a HybridBlock, or a pair "
            "of a HybridBlock and its loss"
        )
    if loss is not None and not callable(loss):
        raise ArgumentError(f"{source}: the loss must be a function or a block, got {loss!r}")
    if not shapes:
        raise ArgumentError(f"{source} returned a block; name its inputs by their shapes")
    symbol = _composed(source, block, loss, list(shapes))
    blocks = [part for part in (block, loss) if isinstance(part, mx.gluon.Block)]
    params = {name: p for part in blocks for name, p in named_parameters(part).items()}
    requests = {n: params[n].grad_req for n in symbol.list_arguments() if n in params}
    type_dict = _with_dtypes(symbol, type_dict, params)
    files, has_loss = _files_of(source), loss is not None
    return Network(symbol, shapes, type_dict, requests, files, gluon=True, has_loss=has_loss)


def _files_of(source: str) -> tuple[Path, ...]:
    """The file of the module in "module:function", if it has one."""
    path = getattr(sys.modules.get(source.partition(":")[0]), "__file__", None)
    return () if path is None else (Path(path),)


def _call(source: str) -> Any:
    """What the function "module:function" returns; modules of the current folder are found."""
    module_name, _, path = source.partition(":")
    try:
        with _current_folder_first():
            target: Any = importlib.import_module(module_name)
            for part in path.split("."):
                target = getattr(target, part)
            is_function = callable(target) and not isinstance(target, mx.gluon.Block)
            return target() if is_function else target
    except (Exception, SystemExit) as error:  # the user's code raises whatever it likes
        frames = traceback.extract_tb(error.__traceback__)
        own = ("<frozen", str(importlib.__file__))  # which says nothing to the user
        last = [frame for frame in frames if not frame.filename.startswith(own)][-1]
        where = f" ({last.filename}, line {last.lineno})" if last.filename != __file__ else ""
        raise ArgumentError(f"{source} failed: {type(error).__name__}: {error}{where}") from error


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """Modules are looked for in the current folder first within, and last afterwards.

    The process that plans looks where this one does, and a random.py there is not Python's.
    """
    if sys.path[:1] == [""]:
        yield
        return
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have removed it
            sys.path.remove("")
        if "" not in sys.path:
            sys.path.append("")


def _composed(source: str, block: Any, loss: Any, names: Sequence[str]) -> mx.sym.Symbol:
    labels = [name for name in names if loss is not None and name.endswith("label")]
    inputs = [of_semantics(mx.sym.Variable(name)) for name in names if name not in labels]
    try:
        with mx.autograd.record():  # blocks that ask in which mode they are shall train
            outputs = block(*inputs)
            if loss is not None:
                variables = [of_semantics(mx.sym.Variable(name)) for name in labels]
                outputs = loss(outputs, *(variables if len(variables) < 2 else [tuple(variables)]))
        return mx.sym.Group(list(leaves(outputs)))
    except (Exception, SystemExit) as error:  # the user's code raises whatever it likes
        advice = ""
        if loss is not None and not labels:
            advice = "; if the loss reads a label, name its shape, too: label=(32,)"
        raise ArgumentError(
            f"the block that {source} returned cannot be called with the inputs "
            f"{', '.join(names)}: {type(error).__name__}: {error}{advice}"
        ) from error


def _kind(result: Any) -> str:
    if isinstance(result, mx.gluon.Block):
        return f"{type(result).__name__}, which is no HybridBlock"
    return type(result).__name__

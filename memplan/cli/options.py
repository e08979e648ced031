"""The options that commands share: which network, which step of it, how it is planned."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import memplan
from memplan.cli.output import check_outputs
from memplan.cli.progress import working
from memplan.errors import ArgumentError, CostError
from memplan.planning import planner
from memplan.planning.realisation import AUTO
from memplan.planning.sizes import MARK
from memplan.step.costs import CostTable
from memplan.strategies import REALISATIONS
from memplan.util.interrupts import Interrupt

if TYPE_CHECKING:
    from memplan.mxnet.load import Network

Command = Callable[..., Any]


def _pair(text: str, form: str, read: Callable[[str], Any]) -> tuple[str, Any]:
    """NAME=VALUE as a pair, the value read by ``read``, which raises ValueError."""
    name, _, value = text.partition("=")
    try:
        if not (name and value):
            raise ValueError
        return name, read(value)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form {form}") from None


def _shape(text: str) -> tuple[int | str, ...]:
    """ "32,3,224,224" or "(32, 3, 224, 224)"; a letter stands for what is searched for."""
    parts = [part.strip() for part in text.strip("()[] ").rstrip(",").split(",")]
    if not all(re.fullmatch("[0-9]{1,18}|[A-Za-z][A-Za-z0-9_]*", part) for part in parts):
        raise ValueError
    return tuple(int(part) if part[0].isdigit() else part for part in parts)


def _request(text: str) -> str:
    if text not in ("write", "add", "null"):
        raise ValueError
    return text


def parse_budget(text: str) -> str | float | None:
    """The budget that ``text`` is: "0.6" a share, "least" none, all else as it is."""
    text = text.strip()
    if text.lower() == "least":
        return None
    return float(text) if re.fullmatch(r"0?\.[0-9]+|1\.0*", text) else text


def parse_share(text: str) -> float:
    """The share of the step's time that ``text`` is: "0.3", or "30%"."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no share such as 0.3 or 30%") from None


class _Named(click.Path):
    """A path of some name: "", as of a shell's unset variable, would be the current folder."""

    def convert(self, value: Any, *place: Any) -> Any:
        if value == "":
            self.fail("it is empty; name a path, or leave the option out", *place)
        if not self.dir_okay and value.endswith(os.sep):
            self.fail(f"{value!r} names a folder", *place)
        if value == "-" and self.file_okay:  # elsewhere stdout, and never meant to be a file's name
            self.fail("'-' is no file here; for stdout name /dev/stdout", *place)
        return super().convert(value, *place)


FILE = _Named(dir_okay=False, path_type=Path)


def default_of(function: Callable[..., Any], name: str) -> Any:
    """The default that ``function`` has for its argument ``name``."""
    return inspect.signature(function).parameters[name].default


@dataclass(frozen=True)
class Arguments:
    """The arguments that say what to plan, as they were typed."""

    network: str
    shape: tuple[tuple[str, tuple[int | str, ...]], ...]
    dtype: tuple[tuple[str, str], ...]
    grad_req: tuple[tuple[str, str], ...]
    ctx: str | None
    realisation: str
    as_json: bool
    costs: str | None = None
    time_limit: float | None = None
    reserve: str | None = None
    optimizer: str | None = None
    cache: Path | None = None

    def load(self, calls: str = "plan") -> Network:
        """The network, whose inputs memplan's function ``calls`` takes by their names.

        ArgumentError for an input with the name of an option.
        """
        from memplan.mxnet.load import load_network
        from memplan.mxnet.profile import profile

        self._check_names("--shape", self.shape)
        if calls != "max_batch_size":
            self._check_sizes()
        self._check_names("--dtype", self.dtype)
        # memplan.profile takes whatever this one takes.
        function = profile if calls == "profile" else getattr(memplan, calls)
        taken = {
            *inspect.signature(planner.plan).parameters,
            *inspect.signature(function).parameters,
        }
        for name, _ in self.shape:
            if name in taken:
                raise ArgumentError(
                    f"an input cannot be called {name!r}, as an option of memplan is; rename it"
                )
        return load_network(
            self.network,
            shapes=dict(self.shape),
            type_dict=dict(self.dtype) or None,
            requests=self.grad_req,
        )

    def _check_sizes(self) -> None:
        """ArgumentError for a size that is no number: N is one for max-batch alone."""
        for name, shape in self.shape:
            for size in shape:
                if isinstance(size, str):
                    given = f"--shape {name}={','.join(map(str, shape))}"
                    known = "; it stands for the batch that 'memplan max-batch' looks for"
                    raise ArgumentError(
                        f"{given}: {size!r} is no number{known if size == MARK else ''}"
                    )

    @staticmethod
    def _check_names(option: str, pairs: Iterable[tuple[str, Any]]) -> None:
        """ArgumentError for a name that an option is given for twice."""
        counts = Counter(name for name, _ in pairs)
        for name in (name for name, count in counts.items() if count > 1):
            raise ArgumentError(f"{option} is given twice for {name!r}; leave one out")

    @contextlib.contextmanager
    def working(
        self, title: str, *outputs: Path | None, calls: str = "plan", keeps_best: bool = True
    ) -> Iterator[tuple[Network, Interrupt]]:
        """Shows that the block works on the network (:func:`memplan.cli.progress.working`).

        ``keeps_best`` is as there.
        ``calls`` is the function of memplan that the block hands the network's inputs to.
        ArgumentError or OutputError before the work where an ``outputs`` cannot be written.
        """
        check_outputs(outputs, self.inputs)
        with working(title, keeps_best=keeps_best) as interrupt:
            network = self.load(calls)
            check_outputs(outputs, network.files)
            if interrupt.has_come:  # and was swallowed, as Python does in what an import calls
                raise KeyboardInterrupt
            yield network, interrupt

    def options(self, network: Network) -> dict[str, Any]:
        """The keyword arguments of :func:`memplan.plan` and the like; defaults are left out."""
        from memplan.mxnet.load import context

        names = ("time_limit", "reserve", "optimizer", "cache")
        values = {name: getattr(self, name) for name in names}
        values["costs"] = self._costs()
        values["ctx"] = None if self.ctx is None else context(self.ctx)
        result = {name: value for name, value in values.items() if value is not None}
        return result | {"realisation": self.realisation} | network.options

    def _costs(self) -> str | CostTable | None:
        """The table in the file that is named; ArgumentError where there is none."""
        if self.costs is None or self.costs[-5:] != ".json":
            return self.costs
        try:
            return CostTable.load(self.costs)
        except CostError as error:
            raise ArgumentError(str(error)) from error

    @property
    def inputs(self) -> list[Path]:
        """Files that are read whatever the network."""
        return [Path(text) for text in (self.network, self.costs) if text and text[-5:] == ".json"]


_STEP = (
    click.argument("network"),
    click.option(
        "--shape",
        multiple=True,
        metavar="NAME=N,N,...",
        type=lambda text: _pair(text, "data=32,3,224,224", _shape),
        help="Shape of an input, such as data=32,3,224,224; repeat for others.",
    ),
    click.option(
        "--dtype",
        multiple=True,
        metavar="NAME=DTYPE",
        type=lambda text: _pair(text, "data=float16", str),
        help="Dtype of an argument, such as data=float16; others are inferred.",
    ),
    click.option(
        "--grad-req",
        multiple=True,
        metavar="PATTERN=write|add|null",
        type=lambda text: _pair(text, "PATTERN=write (or add, or null)", _request),
        help="What arguments get a gradient, where not as Module does it: 'conv0_*=null' freezes "
        "layers. The last that fits an argument counts.",
    ),
    click.option("--ctx", metavar="cpu|gpu[:N]", help="Where it will train."),
    click.option(
        "--realisation",
        type=click.Choice([AUTO, *REALISATIONS]),
        default=AUTO,
        show_default=True,
        help="How MXNet is made to run the plan. 'auto': packed, or explicit where packed memory "
        "refuses the network. With mirror, the output is a Symbol for any training script.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
)

_PLANNING = (
    click.option(
        "--costs",
        metavar="roofline:DEVICE|FILE.json",
        help="Seconds of ops: roofline:v100 (t4, a100, h100, h200, cpu), or what 'memplan profile' "
        "wrote. Default: measured if --ctx is a GPU, else a roofline.",
    ),
    click.option(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="For the search. Default: 60 for each plan, 300 for max-batch.",
    ),
    click.option("--reserve", metavar="BYTES", help="Room to leave, for what memplan cannot know."),
    click.option(
        "--optimizer", metavar="NAME", help="Of MXNet's, such as adam: its states are counted."
    ),
    click.option(
        "--cache",
        type=_Named(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Keep plans there, and take those that are there.",
    ),
)


def _with(options: tuple[Callable[[Command], Command], ...], function: Command) -> Command:
    names = Arguments.__dataclass_fields__

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        args = Arguments(**{name: values.pop(name) for name in names if name in values})
        return function(args, **values)

    for option in reversed(options):
        option(command)
    return command


def step_options(function: Command) -> Command:
    """Gives a command the options that name a network and a step of it, as :class:`Arguments`."""
    return _with(_STEP, function)


def planning_options(function: Command) -> Command:
    """Gives a command those of :func:`step_options`, and the options of every search for a plan."""
    return _with((*_STEP, *_PLANNING), function)


def strategy_option(function: Command) -> Command:
    """Adds --strategy."""
    return click.option(
        "--strategy",
        default=default_of(planner.plan, "strategy"),
        show_default=True,
        help="How to choose what is recomputed; 'memplan strategies' lists them. Options follow "
        "the name: chen_greedy:linear:ntrial=12.",
    )(function)


budget_option = click.option(
    "--budget",
    metavar="BYTES|SHARE",
    type=parse_budget,
    help="For the whole step on the device: 4GiB, '900 MB', 60% of the unplanned step, or least: "
    "the least memory at no more than one extra forward pass.  [default: least]",
)
"""Adds --budget."""

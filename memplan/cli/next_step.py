"""How to train by a plan that the command line has made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.options import Arguments
from memplan.planning.plan import NOT_COUNTED, Plan

if TYPE_CHECKING:
    from memplan.mxnet.load import Network


def next_step(plan: Plan, output: Path | None, args: Arguments, network: Network) -> str:
    """What to write into a script, or to type; ``output`` is the file that holds ``plan``."""
    lines = [""] if output is None else ["", f"Wrote {output}."]
    if network.gluon:
        return "\n".join(lines + _by_gluon(plan, args, network))
    without, is_step = plan.trace.outputs_without_loss, plan.trace.form.spells_out_backward
    if output is None:
        lines.append("To write the planned network: -o FILE")
    elif not (without and is_step):
        arguments = network.symbol.list_arguments()
        labels = [name for name in arguments if name.endswith("label")]
        data = [name for name, _ in args.shape if name not in labels]
        lines += _by_module(plan, output, args, names=_input_names(data, labels))
    if without:
        advice = "put yours behind it; its plan stays on a network that is part of another."
        if is_step:
            advice = "put yours behind it and plan that, for Module cannot train this."
        lines.append(f"Of its outputs {', '.join(without)} is no loss: {advice}")
    return "\n".join(lines)


def _by_gluon(plan: Plan, args: Arguments, network: Network) -> list[str]:
    form = plan.trace.form
    if not form.spells_out_backward:
        return ["Gluon ignores what mirroring marks; for a block take --realisation auto."]
    reserve = plan.footprint.reserve_nbytes
    if not form.updates:  # a trainer updates behind the step, and TrainStep counts no states of it
        reserve += plan.optimizer_nbytes
    options = {
        "budget": plan.budget_nbytes,
        "strategy": repr(plan.strategy),
        "realisation": repr("packed" if form.in_one_array else plan.realisation),
        "reserve": reserve or None,
        "time_limit": args.time_limit,
        "costs": None if args.costs is None else _costs(args.costs),
        "trainer": "trainer" if form.updates else None,
    }
    given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    lines = ["To train the block so:", "  from memplan.mxnet.gluon import TrainStep"]
    if args.costs is not None and args.costs.endswith(".json"):
        lines.append("  from memplan import CostTable")
    what = "block, loss" if network.has_loss else "block"
    lines.append(f"  step = TrainStep({what}, {given})")
    if plan.footprint.workspace_source == NOT_COUNTED:
        lines.append("It also counts the workspace of operators, as the plan does with --ctx.")
    return lines


def _costs(text: str) -> str:
    return f"CostTable.load({text!r})" if text.endswith(".json") else repr(text)


def _by_module(plan: Plan, output: Path, args: Arguments, *, names: str) -> list[str]:
    if not plan.trace.form.spells_out_backward:
        module = f"mx.mod.Module(mx.sym.load({str(output)!r}){names})"
        return [f"Train it as before: module = {module}"]
    net = f"mx.sym.load({args.network!r})" if args.network.endswith(".json") else "net"
    return [
        "To train by it:",
        *(["  import mxnet as mx"] if net != "net" else []),
        "  from memplan.mxnet import Module",
        "  from memplan.mxnet.plan_file import load_plan",
        f"  module = Module({net}, plan=load_plan({str(output)!r}){names})",
    ]


def _input_names(data: list[str], labels: list[str]) -> str:
    """What Module is to be told of inputs, where they are not those that it takes for granted."""
    result = "" if data == ["data"] else f", data_names={data}"
    return result + ("" if labels in ([], ["softmax_label"]) else f", label_names={labels}")

"""The curves of overhead against memory, by realisation: a table, and a picture of them.

    python benchmarks/curves.py [NETWORK ...] [--time-limit SECONDS] [--picture PATH]

Batch 32 at 224 x 224, roofline of a V100. Activations as MXNet allocates them; plans that another
one beats are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import memplan
from memplan.errors import DependencyError
from memplan.planning.plan import Attempt
from networks import MEMONGER_MB, SHAPE, network
from training import DEFAULTS, activations, total_nbytes

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "images"
ROOFLINE = "roofline:v100"

# Percent of overhead up to which curves are drawn: who pays more wants another batch size.
HIGHEST = 50


@dataclass(frozen=True)
class Panel:
    """One network: what MXNet allocates and what it costs, MB and percent, by several plans."""

    name: str
    unplanned_mb: float
    memonger: tuple[float, float]
    curves: dict[str, list[tuple[float, float]]]


def panel(
    name: str,
    strategies: Mapping[str, Sequence[str]],
    shares: Sequence[float],
    time_limit: float,
) -> Panel:
    """Plans by the ``strategies`` of every realisation, by the roofline of a V100.

    Their activations get ``shares`` of what MXNet allocates unplanned; by mirroring, which cannot
    go so low, also the least.
    """
    net = network(name)
    memonger = memplan.plan(net, strategy="memonger", costs=ROOFLINE, data=SHAPE)
    whole = memonger.unplanned
    budgets: list[int | None] = [total_nbytes(whole, share) for share in shares]
    curves = {}
    for realisation, names in strategies.items():
        plans = memplan.compare(
            net,
            strategies=names,
            budgets=[*budgets, None] if realisation == "mirror" else budgets,
            realisation=realisation,
            costs=ROOFLINE,
            time_limit=time_limit,
            data=SHAPE,
        )
        curves[f"{realisation} ({', '.join(names)})"] = undominated(plans.rows)
    return Panel(
        name,
        whole.allocated_nbytes / 2**20,
        (float(MEMONGER_MB[name]), 100.0 * memonger.overhead),
        curves,
    )


def undominated(rows: Iterable[Attempt]) -> list[tuple[float, float]]:
    """Activation MB and percent of overhead of the plans that no other one beats."""
    plans = [row.plan for row in rows if row.plan is not None]
    best: list[tuple[float, float]] = []
    for nbytes, overhead in sorted((activations(plan), plan.overhead) for plan in plans):
        if not best or 100.0 * overhead < best[-1][1]:
            best.append((nbytes / 2**20, 100.0 * overhead))
    return best


def print_panel(panel: Panel) -> None:
    """A line per plan."""
    points = [(label, point) for label, curve in panel.curves.items() for point in curve]
    for label, (mb, overhead) in [("memonger's own code", panel.memonger), *points]:
        print(
            f"| {panel.name} | {label} | {mb:.0f} of {panel.unplanned_mb:.0f} | {overhead:.1f}% |",
            flush=True,
        )


def draw(panels: Sequence[Panel], path: Path) -> None:
    """A picture of the panels, side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError(
            "the picture needs matplotlib; pip install 'memplan[plot]'"
        ) from error
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for marker, (label, curve) in zip("so^v", panel.curves.items(), strict=False):
            axes.plot(*zip(*curve, strict=True), marker=marker, markersize=4, label=label)
        axes.plot(*panel.memonger, "kx", label="memonger's own code")
        axes.plot(panel.unplanned_mb, 0.0, "kD", markersize=4, label="unplanned")
        axes.set_title(panel.name)
        axes.set_xlabel("activations as MXNet allocates them, MB")
        axes.set_xlim(left=0)
        axes.set_ylim(0, HIGHEST)
        axes.grid(alpha=0.3)
        if not place:
            axes.set_ylabel("overhead, % of the unplanned step")
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Print a line per plan, and draw all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=DEFAULTS, metavar="NETWORK")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds for each plan")
    parser.add_argument("--mirror", nargs="+", default=["checkmate"], help="strategies")
    parser.add_argument("--explicit", nargs="+", default=["auto"], help="strategies")
    parser.add_argument("--packed", nargs="+", default=["auto"], help="strategies")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.9, 0.75, 0.6, 0.5, 0.4, 0.34, 0.29, 0.25]
    )
    parser.add_argument("--picture", type=Path, default=PICTURES / "overhead_and_memory.png")
    options = parser.parse_args()
    print("| network | plans | allocated MB | overhead |")
    print("|---|---|---|---|", flush=True)
    strategies = {
        "mirror": options.mirror,
        "explicit": options.explicit,
        "packed": options.packed,
    }
    panels = []
    for name in options.networks:
        panels.append(panel(name, strategies, options.shares, options.time_limit))
        print_panel(panels[-1])
    draw(panels, options.picture)


if __name__ == "__main__":
    main()

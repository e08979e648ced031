"""How long planning takes, and how much memory, from a hundred training ops to ten thousand.

    python benchmarks/scale.py [--time-limit SECONDS] [--plot docs/images/scale.png] [DEPTH ...]

Residual networks of memonger's kind, DEPTH times one module in each stage, batch 1 at 224 x 224,
roofline of a V100: traced, then planned (explicit, in MXNet's blocks) at half of the activations.
The largest has SECONDS to be planned, the others in proportion, but 20 at least.
Every size is planned in a fresh process, whose peak of memory is read at the end. "greedy" is the
plan with which the search begins: what is cheapest per byte is dropped where the peak is, as DTR
does, for the largest share of the budget for which MXNet's blocks fit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.planning.job import Job

DEPTHS = (1, 4, 16, 64, 128)
SHAPE = (1, 3, 224, 224)


def measure(depth: int, realisation: str, time_limit: float) -> dict[str, float]:
    """Figures of one network, planned in this process."""
    import networks
    from memplan.planning.attempt import try_strategy
    from memplan.planning.job import Job

    net = networks.memonger_resnet((depth,) * 4)
    begin = time.monotonic()
    job = Job.prepare(
        net, realisation=realisation, costs="roofline:v100", time_limit=time_limit, data=SHAPE
    )
    traced = time.monotonic() - begin
    budget = job.unplanned.total_nbytes - job.unplanned.allocated_nbytes // 2
    overhead = greedy(job, budget)
    begin = time.monotonic()
    auto = try_strategy(job, "auto", budget)
    seconds = time.monotonic() - begin
    mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "ops": len(job.graph.ops),
        "traced": traced,
        "greedy": overhead,
        "auto": float("nan") if auto.plan is None else auto.plan.overhead,
        "bound": float("nan") if auto.plan is None else auto.plan.lower_bound_overhead or 0.0,
        "seconds": seconds,
        "mebibytes": mebibytes,
    }


def greedy(job: Job, budget_nbytes: int) -> float:
    """Overhead of the first greedy plan that MXNet places within the budget."""
    from memplan.search.sequence_search import search
    from memplan.search.sequences import Rules
    from memplan.util.stop import Stop

    limit = budget_nbytes - job.graph.fixed_nbytes
    for percent in range(100, 20, -5):
        schedule = search(
            job.graph,
            limit * percent // 100,
            rules=Rules(recompute_backward=False, reorder=False, match_ranges=()),
            starts=[],
            seed=0,
            stop=Stop.after(60.0),
            rounds=0,
        )
        if schedule is not None and job.memory.nbytes(schedule) <= limit:
            return schedule.overhead
    return float("nan")


def plot(rows: list[dict[str, float]], path: str) -> None:
    """Seconds and memory against the number of ops."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    labels = {"seconds": "seconds to plan", "mebibytes": "peak memory of the planner, MiB"}
    for axes, (name, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        axes.plot([row["ops"] for row in rows], [row[name] for row in rows], marker="o")
        axes.set(xscale="log", xlabel="training ops", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print a row per size; draw them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("depths", nargs="*", type=int)
    parser.add_argument("--realisation", choices=["explicit", "packed"], default="explicit")
    parser.add_argument("--time-limit", type=float, default=240.0)
    parser.add_argument("--plot")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.realisation, options.time_limit)))
        return
    print("| ops | traced in s | greedy | `auto` | proved bound | planned in s | peak MiB |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    depths = options.depths or DEPTHS
    for depth in depths:
        command = [sys.executable, __file__, "--one", str(depth)]
        limit = max(20.0, options.time_limit * depth / max(depths))
        command += ["--time-limit", str(limit), "--realisation", options.realisation]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(answer.splitlines()[-1])
        rows.append(row)
        print(
            f"| {row['ops']:.0f} | {row['traced']:.1f} | {row['greedy']:.1%} | {row['auto']:.1%} | "
            f"{row['bound']:.1%} | {row['seconds']:.0f} | {row['mebibytes']:.0f} |",
            flush=True,
        )
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()

"""Training steps of forward passes of many shapes, on which nothing was tuned."""

from __future__ import annotations

import random
from collections.abc import Iterator

from memplan.step.graph import Op, Tensor, TrainingGraph

# The forward ops that each one reads.
Wiring = list[tuple[int, ...]]


def training_step(wiring: Wiring, seed: int) -> TrainingGraph:
    """Forward ops of random seconds and bytes, a loss of all that nobody reads, backward ops.

    The backward op of each reads what it has read, written or both, and the gradients of what it
    has written; it writes the sum of the gradients of what it has read.
    """
    draw = random.Random(seed)
    read = {source for inputs in wiring for source in inputs}
    ends = tuple(op for op in range(len(wiring)) if op not in read)
    nforward = len(wiring) + 1
    ops = [Op(f"f{i}", "op", ins, (i,), draw.uniform(1, 9)) for i, ins in enumerate(wiring)]
    ops.append(Op("loss", "loss", ends, (nforward - 1,), 1.0))
    sizes = [draw.choice((1, 2, 3, 4, 6)) for _ in wiring]
    tensors = [Tensor(f"f{i}", n * 1024, n * 256) for i, n in enumerate(sizes)]
    tensors.append(Tensor("loss", 1024, 256))
    readers: dict[int, list[int]] = {end: [nforward - 1] for end in ends}
    for i in reversed(range(len(wiring))):
        place = len(ops)
        kept = draw.choice(((i,), wiring[i], (i, *wiring[i])))
        reads = tuple(dict.fromkeys((*readers[i], *kept)))
        seconds = draw.uniform(1, 2) * ops[i].seconds
        ops.append(Op(f"b{i}", "op", reads, (place,), seconds, differentiates=i, after=(i,)))
        given = sum(sizes[source] for source in wiring[i]) or 1
        tensors.append(Tensor(f"b{i}", given * 1024, given * 256))
        for source in wiring[i]:
            readers.setdefault(source, []).append(place)
    heads = tuple(op.outputs[0] for op in ops[nforward:] if not wiring[int(op.name[1:])])
    return TrainingGraph(tuple(ops), tuple(tensors), heads, nforward)


def chain(length: int) -> Wiring:
    return [(i - 1,) if i else () for i in range(length)]


def tree(leaves: int) -> Wiring:
    """Pairs are joined until one is left."""
    wiring: Wiring = [() for _ in range(leaves)]
    level = list(range(leaves))
    while len(level) > 1:
        pairs = [level[k : k + 2] for k in range(0, len(level), 2)]
        level = [len(wiring) + k for k in range(len(pairs))]
        wiring += [tuple(pair) for pair in pairs]
    return wiring


def cells(count: int) -> Wiring:
    """A recurrent cell again and again: three ops, of which two carry on to the next cell."""
    wiring: Wiring = [(), ()]
    for _ in range(count):
        hidden, carried = len(wiring) - 1, len(wiring) - 2
        first = len(wiring)
        wiring += [(hidden,), (first, carried), (first, first + 1)]
    return wiring


def shortcuts(length: int) -> Wiring:
    """Every third op also reads what came three before it."""
    return [
        ((i - 1, i - 3) if i % 3 == 0 and i > 2 else (i - 1,)) if i else () for i in range(length)
    ]


def tangle(length: int, seed: int) -> Wiring:
    """Every op reads one to three of the twelve before it."""
    draw = random.Random(seed)
    return [
        tuple(sorted(draw.sample(range(max(0, i - 12), i), min(i, draw.choice((1, 1, 2, 3))))))
        for i in range(length)
    ]


def held_out() -> Iterator[tuple[str, TrainingGraph]]:
    """Ten steps of 30 to 130 ops."""
    wirings = {
        "chain": chain(30),
        "long chain": chain(60),
        "tree": tree(16),
        "wide tree": tree(28),
        "cells": cells(9),
        "many cells": cells(18),
        "shortcuts": shortcuts(24),
        "long shortcuts": shortcuts(48),
        "tangle": tangle(25, 1),
        "large tangle": tangle(45, 2),
    }
    for seed, (name, wiring) in enumerate(wirings.items()):
        yield name, training_step(wiring, seed)

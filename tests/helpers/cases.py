"""The networks that explicit and packed steps are compared with MXNet on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx

from helpers.networks import (
    Network,
    dropout_net,
    dropout_of_pictures,
    hinted_resnet,
    residual_net,
    two_headed_net,
    unrolled_lstm,
)
from helpers.schedules import random_schedule
from helpers.special_networks import (
    constants,
    duplicates,
    embedding,
    fused_rnn,
    gathered,
    group_norm_net,
    half_precision,
    head_that_is_an_argument,
    layer_norm_net,
    many_terms,
    multi_head,
    normalized_by_what_it_reads,
    normalized_in_two_branches,
    norms,
    numpy_operators,
    one_term_many_times,
    only_shown,
    random_numbers,
    repeated_heads,
    shared_weights,
    transformer,
    twice_normalized,
    unet,
    unet_to_target,
)
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule


@dataclass(frozen=True)
class Case:
    """A network to train: ``integers`` bounds the inputs that are indices."""

    network: Callable[[], Network]
    options: Mapping[str, Any] = field(default_factory=dict)
    integers: Mapping[str, int] = field(default_factory=dict)

    def trace(self, realisation: str = "explicit") -> Trace:
        """With the same names whenever it is called: random values are drawn by name."""
        with mx.name.NameManager():
            symbol, shapes = self.network()
        return trace(symbol, shapes=shapes, realisation=realisation, **self.options)


CASES = {
    "residual": Case(residual_net),
    "hinted": Case(hinted_resnet),
    "dropout": Case(dropout_net),
    "dropout_of_pictures": Case(dropout_of_pictures),
    "two_headed": Case(two_headed_net),
    "lstm": Case(unrolled_lstm),
    "unet": Case(unet),
    "unet_no_bias": Case(
        lambda: unet(bias=False, kernel=(4, 4), stride=(2, 2), pad=(1, 1)),
        {"grad_req": "write"},
    ),
    "unet_adjusted": Case(
        lambda: unet(kernel=(3, 3), stride=(2, 2), pad=(1, 1), adj=(1, 1), num_group=2)
    ),
    "unet_to_target": Case(unet_to_target),
    "unet_float64": Case(unet, {"type_dict": {"data": "float64"}}),
    "layer_norm": Case(layer_norm_net),
    "group_norm": Case(group_norm_net),
    "norms": Case(norms),
    "transformer": Case(transformer, integers={"data": 30}),
    "embedding": Case(embedding, integers={"data": 30, "places": 8}),
    "embedding_int32": Case(
        embedding, {"type_dict": {"data": "int32", "places": "int32"}}, {"data": 30, "places": 8}
    ),
    "fused_lstm": Case(fused_rnn),
    "fused_gru": Case(lambda: fused_rnn("gru")),
    "fused_dropout": Case(lambda: fused_rnn("rnn_tanh", 0.4)),
    "shared_weights": Case(shared_weights),
    "twice_normalized": Case(twice_normalized),
    "normalized_by_what_it_reads": Case(normalized_by_what_it_reads),
    "normalized_in_two_branches": Case(normalized_in_two_branches),
    "repeated_heads": Case(repeated_heads, {"grad_req": "write"}),
    "head_that_is_an_argument": Case(head_that_is_an_argument, {"grad_req": "write"}),
    "multi_head": Case(multi_head),
    "gathered": Case(gathered, integers={"places": 6}),
    "terms2": Case(many_terms(2)),
    "terms5": Case(many_terms(5)),
    "terms7": Case(many_terms(7)),
    "terms12": Case(many_terms(12)),
    "one_term_many_times": Case(one_term_many_times),
    "duplicates": Case(duplicates),
    "constants": Case(constants, {"grad_req": "write"}),
    "random_numbers": Case(random_numbers),
    "only_shown": Case(only_shown, integers={"places": 3}),
    "half_precision": Case(half_precision),
    "numpy": Case(numpy_operators),
    "added": Case(residual_net, {"grad_req": "add"}),
    "some_added": Case(
        unrolled_lstm, {"grad_req": {"layer0_i2h_weight": "add", "cls_weight": "write"}}
    ),
    "unet_added": Case(unet, {"grad_req": "add"}),
    "fixed": Case(
        residual_net, {"grad_req": {"first_weight": "write", "unit1_a_bn_gamma": "write"}}
    ),
}


def assert_identical_to_mxnet(name: str, **nschedules: int) -> None:
    """Unplanned and by random schedules, this many in all for each realisation, steps leave what
    MXNet's own do, bit for bit."""
    case = CASES[name]
    stock = None
    for realisation, count in nschedules.items():
        traced = case.trace(realisation)
        values = random_values(traced, case.integers)
        stock = stock or stock_steps(traced, values)
        for seed in range(count):
            graph = traced.graph
            schedule = random_schedule(graph, seed) if seed else Schedule.unplanned(graph)
            found = planned_steps(bound(traced, schedule, values))
            assert not differences(stock, found), f"{realisation}, seed {seed}"

"""The JSON in which MXNet reads and writes Symbols: JSON but for what stands between quotes.

MXNet knows the escapes of quotes, backslashes, newlines, returns and tabs and takes every other
character as it is, in UTF-8 (dmlc/json.h). Python escapes more, and refuses some that are raw.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import mxnet as mx

from memplan.util.files import parse_json

# In text that Python wrote: an escape that MXNet may not know, or a pair that must stay together.
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|.)")

_RAW = {"b": "\b", "f": "\f"}


def load(data: Mapping[str, Any]) -> mx.sym.Symbol:
    """The symbol that ``data``, in the form of :func:`parse`, describes."""
    return mx.sym.load_json(_ESCAPE.sub(_as_mxnet, json.dumps(data, ensure_ascii=False)))


def read(text: str) -> mx.sym.Symbol:
    """The symbol in the ``text`` of a file; MXNetError or ValueError for text that is damaged.

    MXNet does not look whether the outputs are there that an op is said to read, and crashes.
    """
    data = parse_text(text)
    _check_reads(data["nodes"], data["heads"], data.get("node_row_ptr"))
    return mx.sym.load_json(text)


def _check_reads(nodes: Any, heads: Any, first_outputs: Any) -> None:
    """ValueError unless ops read, and heads are, outputs of nodes that stand before them.

    How many outputs a node has is not known without ``first_outputs``, which MXNet has not always
    written.
    """
    if first_outputs is None:
        noutputs = [math.inf] * len(nodes)
    else:
        noutputs = [end - begin for begin, end in pairwise(first_outputs)]
    reads = [(place, entry) for place, node in enumerate(nodes) for entry in node["inputs"]]
    reads += [(len(nodes), entry) for entry in heads]
    for place, (source, output, *_) in reads:
        if not (0 <= source < place and 0 <= output < noutputs[source]):
            name = nodes[place]["name"] if place < len(nodes) else "the end"
            raise ValueError(f"{name!r} reads output {output} of node {source}, which is not there")


def text_of(symbol: mx.sym.Symbol) -> str:
    """``symbol`` as MXNet writes it, casts of AMP included."""
    text = str(symbol.tojson(remove_amp_cast=False))
    # MXNet keeps the last text that it wrote, which has a megabyte for 2,000 ops.
    mx.sym.Variable("none").tojson()
    return text


def parse(symbol: mx.sym.Symbol) -> Any:
    """What ``symbol`` is made of: "nodes", "heads" and the like."""
    return parse_text(text_of(symbol))


def attributes(symbol: mx.sym.Symbol) -> list[tuple[str, dict[str, str]]]:
    """Name and attributes of every node of ``symbol``.

    ``Symbol.attr_dict()`` splits both at "$", and fails where a name has one.
    """
    return [(node["name"], node.get("attrs", {})) for node in parse(symbol)["nodes"]]


def parse_text(text: str) -> Any:
    """What is in the JSON that MXNet wrote; ValueError for any that is damaged."""
    return parse_json(text, strict=False)


def _as_mxnet(escape: re.Match[str]) -> str:
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _RAW.get(code, escape[0])

"""The JSON in which MXNet reads and writes Symbols: JSON but for what stands between quotes.

MXNet knows the escapes of quotes, backslashes, newlines, returns and tabs and takes every other
character as it is, in UTF-8 (dmlc/json.h). Python escapes more, and refuses some that are raw.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import mxnet as mx

# In text that Python wrote: an escape that MXNet may not know, or a pair that must stay together.
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|.)")

_RAW = {"b": "\b", "f": "\f"}


def load(data: Mapping[str, Any]) -> mx.sym.Symbol:
    """The symbol that ``data``, in the form of :func:`parse`, describes."""
    return mx.sym.load_json(_ESCAPE.sub(_as_mxnet, json.dumps(data, ensure_ascii=False)))


def parse(symbol: mx.sym.Symbol) -> Any:
    """What ``symbol`` is made of: "nodes", "heads" and the like, casts of AMP included."""
    return parse_text(symbol.tojson(remove_amp_cast=False))


def parse_text(text: str) -> Any:
    """What is in the JSON that MXNet wrote."""
    return json.loads(text, strict=False)


def _as_mxnet(escape: re.Match[str]) -> str:
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _RAW.get(code, escape[0])

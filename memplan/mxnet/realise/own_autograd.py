"""Functions of MXNet's autograd for memplan itself, whoever wraps those that scripts call."""

from __future__ import annotations

import inspect

from mxnet import autograd

from memplan.mxnet.realise.wrapped_functions import copy_of

backward_of_mxnet = copy_of(inspect.unwrap(autograd.backward))
mark_variables = copy_of(inspect.unwrap(autograd.mark_variables))

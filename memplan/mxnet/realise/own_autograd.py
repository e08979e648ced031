"""Functions of MXNet's autograd for memplan itself, whoever wraps those that scripts call."""

from __future__ import annotations

from mxnet import autograd

from memplan.mxnet.realise.wrapped_functions import copy_of

backward_of_mxnet = copy_of(autograd.backward)
mark_variables = copy_of(autograd.mark_variables)

"""The public path of :class:`TrainStep` and :func:`planned`."""

from memplan.mxnet.train.planned import planned
from memplan.mxnet.train.train_step import TrainStep

__all__ = ["TrainStep", "planned"]

"""The public path of :class:`TrainStep`."""

from memplan.mxnet.train.train_step import TrainStep

__all__ = ["TrainStep"]

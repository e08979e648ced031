"""The public path of :class:`TrainExecutor`."""

from memplan.mxnet.train.train_executor import TrainExecutor

__all__ = ["TrainExecutor"]

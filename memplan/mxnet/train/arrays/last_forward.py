"""What an executor's last ``forward`` was, of which ``backward`` is asked for gradients."""

from __future__ import annotations

from memplan.errors import UsageError


class LastForward:
    """The last ``forward`` of an executor: a training step, inference, or none so far."""

    def __init__(self) -> None:
        self._inferred = False

    def begin(self, *, is_train: bool) -> None:
        """Another one begins."""
        self._inferred = not is_train

    def check(self) -> None:
        """UsageError where it was inference, of which MXNet's ``backward`` computes gradients."""
        if self._inferred:
            raise UsageError(
                "backward() after forward(is_train=False): by a plan gradients are computed within "
                "forward(is_train=True), and an inference computes none. Call "
                "forward(is_train=True) last before backward() (a Module's forward_backward(batch) "
                "does both), and evaluate after it; for gradients of an inference bind the network "
                "without a plan (mx.mod.Module, or net.simple_bind)"
            )

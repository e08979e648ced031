"""What a device holds for this process, by its own count."""

from __future__ import annotations

import contextlib
from pathlib import Path

import mxnet as mx

from memplan.util.heap import give_back_what_is_free


class MemoryGrowth:
    """The bytes by which what this process holds on ``ctx`` has grown, at most, since it was made.

    On a CPU these are the pages of the process in memory (VmHWM of the Linux kernel: arrays,
    workspaces, libraries' own buffers and their code as far as it was used). On a GPU it is what
    the driver says is in use, other processes included, when :meth:`look` is called: MXNet gives
    nothing back to it meanwhile.
    """

    def __init__(self, ctx: mx.Context) -> None:
        self._ctx = ctx
        mx.nd.waitall()
        if ctx.device_type != "gpu":
            give_back_what_is_free()  # what is allocated next counts then
            # Without permission to do so the peak of before stands, where that is higher.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._now()
        self.nbytes = 0

    def look(self) -> int:
        """Wait until MXNet is done; the bytes so far."""
        mx.nd.waitall()
        nbytes = self._now() if self._ctx.device_type == "gpu" else _status("VmHWM")
        self.nbytes = max(self.nbytes, nbytes - self._before)
        return self.nbytes

    def _now(self) -> int:
        if self._ctx.device_type != "gpu":
            return _status("VmRSS")
        free, total = mx.context.gpu_memory_info(self._ctx.device_id)
        return int(total - free)


def _status(field: str) -> int:
    """Bytes, by the kernel: VmRSS now, VmHWM at most."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{field}:")[1].split()[0]) * 1024

"""The columns into which oneDNN rolls pictures out for convolutions that are products of matrices.

Read in the source of oneDNN 2.4 (src/cpu/gemm_convolution_utils.cpp and gemm_convolution.cpp), for
the usual layout. Either every thread multiplies on its own, with columns of its own, or all of them
make one product after another, of the same columns. Memory counts that is written: a thread that
finds no picture to work on leaves its columns as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memplan.mxnet.realise.estimate.onednn_geometry import Convolution
from memplan.mxnet.realise.estimate.processor import (
    cache_nbytes,
    cache_nbytes_of_onednn,
    has_avx512,
)

# Columns that would take more than this many times what a convolution reads and writes, or more
# than a gigabyte, are made a few at a time: for the gradient of the data in a tenth of that, and
# for that of the weight in a twentieth (scratchpad_limit, and _coef). No convolution takes more.
MOST_COLUMNS, MOST_COLUMNS_NBYTES = 15, 1 << 30
OF_DATA, OF_WEIGHT = 10, 20

# Threads make their own products of pictures with fewer places than this for each thread, or, for
# the gradient of the data, if the kernel has fewer; and where the share of a thread is that small.
_FEW_PLACES, _FEW_FOR_WEIGHT, _SMALL_KERNEL, _SMALL_SHARE = 512, 256, 64, 1 << 16

# So many places are multiplied at a time, at least.
_PLACES_AT_ONCE = 48


@dataclass(frozen=True)
class Columns:
    """Those of ``conv``, of numbers of ``itemsize`` bytes, with so many threads.

    ``arrays_nbytes`` are what it reads and writes, its weight included.
    """

    conv: Convolution
    nthreads: int
    arrays_nbytes: int
    itemsize: int

    @property
    def forward_nbytes(self) -> int:
        """Those for a convolution itself: none where they would be too many, and oneDNN has none.

        Of volumes a thread has those of a slice, and fills them with zeros before anything else. Of
        pictures the first thread counts as many as the cache could hold: processes grow by more
        than the columns that are there (of eight convolutions of odd channels by 13 MB).
        """
        if self.conv.ndim > 2:
            nbytes = self.of_picture_nbytes * (self.nthreads if self._splits_volume() else 1)
            return nbytes if nbytes <= self._most_nbytes else 0
        of_thread = self._nbytes_that_fit_a_cache
        if self.nthreads * of_thread > self._most_nbytes:
            return 0
        first = max(of_thread, min(self.of_picture_nbytes, cache_nbytes(2)))
        return first + (self.nthreads - 1) * of_thread

    @property
    def of_data_nbytes(self) -> int:
        """Those for the gradient of the data."""
        nthreads = self.nthreads if self.splits_gradient_of_data() else 1
        return self._nbytes_of(nthreads, self.conv.batch * self.conv.groups, OF_DATA)

    @property
    def of_weight_nbytes(self) -> int:
        """Those for the gradient of the weight, and the gradients by thread, which are added."""
        if not self.splits_gradient_of_weight():
            return self._nbytes_of(1, 1, OF_WEIGHT)
        ngroups = min(self.conv.groups, self.nthreads)
        nparts = min(self.conv.batch, self.nthreads // ngroups)
        copies = nparts * ngroups * self._weight_nbytes // self.conv.groups if nparts > 1 else 0
        return copies + self._nbytes_of(self.nthreads, ngroups * nparts, OF_WEIGHT)

    def _nbytes_of(self, nthreads: int, nused: int, part: int) -> int:
        """Those of a gradient of which so many threads have columns, and ``nused`` use them."""
        nbytes = nthreads * self.of_picture_nbytes
        if nbytes > self._most_nbytes:
            nbytes = self._most_nbytes // part
        return nbytes * min(nthreads, nused) // nthreads

    @property
    def of_picture_nbytes(self) -> int:
        """The columns of a picture, or of a slice of a volume, of a group."""
        conv = self.conv
        if self.kernel == 1 and all(axis.data == axis.out for axis in conv.axes):
            return 0
        return conv.ninputs * self.kernel * self.nplaces * self.itemsize

    @property
    def _nbytes_that_fit_a_cache(self) -> int:
        """The columns that a thread makes at a time for a convolution of pictures.

        The best number of places is looked for. What was found was this, up to a fortieth: as many
        as fit beside what is read and written, or all of them if the columns fit. A weight for
        which there is no room is multiplied in parts, of whatever fits.
        """
        conv, room = self.conv, cache_nbytes_of_onednn(2)
        strides = conv.height.stride * conv.width.stride
        if self.of_picture_nbytes * (strides + self.kernel) <= room * self.kernel:
            return self.of_picture_nbytes
        of_group = conv.noutputs * conv.ninputs * self.kernel * self.itemsize
        of_place = ((strides + self.kernel) * conv.ninputs + conv.noutputs) * self.itemsize
        nplaces = (room - of_group) // of_place
        if nplaces < _PLACES_AT_ONCE:
            return min(self.of_picture_nbytes, room)
        return self.of_picture_nbytes * min(nplaces, self.nplaces) // self.nplaces

    def _splits_volume(self) -> bool:
        """Does each thread multiply slices of its own?"""
        conv = self.conv
        nslices = conv.groups * conv.batch * conv.depth.out
        is_one = conv.depth.out == conv.batch == 1 and conv.groups <= 2
        is_small = self.nplaces // self.nthreads < _FEW_PLACES
        return is_small and not is_one and self._suits(nslices, self.nplaces, conv.noutputs)

    def splits_gradient_of_data(self) -> bool:
        """Does each thread compute it for pictures of its own?"""
        conv = self.conv
        is_small = self.nplaces // self.nthreads < _FEW_PLACES or self.kernel < _SMALL_KERNEL
        nread = conv.height.data * conv.width.data
        return (
            is_small
            and self._has_many
            and self._suits(conv.groups * conv.batch, nread, conv.ninputs)
        )

    def splits_gradient_of_weight(self) -> bool:
        """Does each thread compute it for pictures of its own, to be added then?"""
        at_once = 64 if has_avx512() else 32  # bytes
        of_thread = 4 * self._weight_nbytes + self.conv.ninputs * self.kernel * at_once
        fits = self.nthreads * of_thread < self._most_nbytes
        is_small = self.nplaces // self.nthreads < _FEW_FOR_WEIGHT
        return self.nthreads > 1 and fits and is_small and self._has_many

    def _suits(self, nparts: int, nplaces: int, nchannels: int) -> bool:
        """Do that many parts keep the threads busy, as well as one product would, or is it small?

        The product has ``nplaces`` rows and ``nchannels`` columns.
        """
        at_once = 16 if has_avx512() else 8
        nblocks = math.prod(-(-number // at_once) for number in (nplaces, nchannels))
        size = nplaces * self.conv.ninputs * self.conv.noutputs
        is_small = size // self.nthreads < _SMALL_SHARE
        return is_small or self._share_busy(nparts) >= self._share_busy(nblocks)

    def _share_busy(self, nparts: int) -> float:
        """The share of the threads that work, on average, when they do ``nparts`` in turn."""
        return nparts / (-(-nparts // self.nthreads) * self.nthreads)

    @property
    def _has_many(self) -> bool:
        return self.conv.batch != 1 or self.conv.groups > 2

    @property
    def kernel(self) -> int:
        """To how many places the kernel reaches."""
        return math.prod(axis.kernel for axis in self.conv.axes)

    @property
    def nplaces(self) -> int:
        """How many places a picture, or a slice of a volume, has that a convolution writes."""
        return self.conv.height.out * self.conv.width.out

    @property
    def _weight_nbytes(self) -> int:
        channels = self.conv.groups * self.conv.ninputs * self.conv.noutputs
        return channels * self.kernel * self.itemsize

    @property
    def _most_nbytes(self) -> int:
        return min(MOST_COLUMNS * self.nthreads * self.arrays_nbytes, MOST_COLUMNS_NBYTES)

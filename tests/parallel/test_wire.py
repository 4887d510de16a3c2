"""Plans on their way to the ranks."""

from __future__ import annotations

import numpy as np

from chorale.parallel.wire import _array


def test_arrays_are_read_by_their_scalar_type() -> None:
    """From numpy 2.5 on, the type that the decoder passes does not equal ``BoolArray``."""
    assert _array(np.ndarray[tuple[int], np.dtype[np.bool_]], b"\1\0\1").tolist() == [True, False, True]
    assert _array(np.ndarray[tuple[int], np.dtype[np.int32]], b"\1\0\0\0").tolist() == [1]

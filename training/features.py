"""The spelling features of tokens as one matrix, computed by the code that serves the demo archive."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chorale.model.demo.features import NUM_FEATURES, FloatArray, feature_parts


def token_features(token_bytes: list[bytes], ids: npt.NDArray[np.int64] | None = None) -> FloatArray:
    """Returns [len(token_bytes), NUM_FEATURES] float32, or only the rows ``ids``; rows have a norm near 1."""
    parts = feature_parts(token_bytes)
    ids = np.arange(len(token_bytes)) if ids is None else ids
    features = np.empty((len(ids), NUM_FEATURES), np.float32)
    features[:, parts.columns_of_core] = parts.of_core[parts.core_ids[ids]]
    features[:, parts.columns_own] = parts.own[ids]
    for columns, rows in zip(parts.columns_of_piece, parts.piece_ids, strict=True):
        features[:, columns] = parts.of_piece[rows[ids]]
    return features

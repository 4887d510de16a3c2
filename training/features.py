"""The spelling features of tokens as one matrix, computed by the code that serves the demo archive."""

from __future__ import annotations

import numpy as np

from chorale.model.demo.features import NUM_FEATURES, FloatArray, feature_parts


def token_features(token_bytes: list[bytes]) -> FloatArray:
    """Returns [len(token_bytes), NUM_FEATURES] float32; rows have a norm near 1."""
    parts = feature_parts(token_bytes)
    features = np.empty((len(token_bytes), NUM_FEATURES), np.float32)
    features[:, parts.columns_of_core] = parts.of_core[parts.core_ids]
    features[:, parts.columns_own] = parts.own
    for columns, rows in zip(parts.columns_of_piece, parts.piece_ids, strict=True):
        features[:, columns] = parts.of_piece[rows]
    return features

// Dense products of many tokens on tiles.
#pragma once

constexpr int64_t kFewest8 = 9;      // fewest tokens; for fewer, AVX-512 is as fast (2880 by 5120, Granite Rapids)
constexpr int64_t kTaskRows = 64;    // rows per task
constexpr int64_t kPieceTiles = 8;   // tiles of tokens per task, whose inputs stay in a core's L2 cache

// Calls write(token, first row, mask of rows, values) for each token of a tile.
template <class Write>
inline void by_token(const float* sums, int64_t begin, int64_t end, int64_t tokens, const Write& write) {
    for (int64_t first = begin; first < end && first < begin + kPanel; first += kTile, sums += kTile * kTile) {
        const int64_t count = end - first < kTile ? end - first : kTile;
        const auto mask = static_cast<__mmask16>((1 << count) - 1);
        __m512i values[kTile];
        for (int64_t i = 0; i < kTile; i++) values[i] = _mm512_load_si512(sums + i * kTile);
        transpose(values);
        for (int64_t token = 0; token < tokens; token++) write(token, first, mask, (__m512)values[token]);
    }
}

inline void linear_tiles(const float* x, int64_t tokens, const float* norm, float eps, const Matrix& weight, float* out,
                         bool adds) {
    static thread_local Space<uint16_t> space;
    const Int8Tiles rows(weight);
    const int64_t columns = weight.columns, tiles = num_tiles(tokens), stride = rows.num_steps() * kTileWords;
    uint16_t* packed = space.take(tiles * stride);
    chorale::parallel(tiles, [&](long tile) {
        static thread_local Space<float> normed;
        float* at = norm == nullptr ? nullptr : normed.take(kTile * columns);
        const float* from[kTile];
        const int64_t first = tile * kTile, count = tokens - first < kTile ? tokens - first : kTile;
        for (int64_t i = 0; i < count; i++) {
            from[i] = x + (first + i) * columns;
            if (norm == nullptr) continue;
            norm_row(from[i], columns, norm, eps, at + i * columns);
            from[i] = at + i * columns;
        }
        pack_tile(from, count, columns, packed + tile * stride);
    });
    const auto* bias = static_cast<const float*>(weight.bias);
    const int64_t row_tasks = (weight.rows + kTaskRows - 1) / kTaskRows;
    const int64_t pieces = (tiles + kPieceTiles - 1) / kPieceTiles;
    chorale::parallel(pieces * row_tasks, [&](long task) {
        const TileShapes shapes;
        const int64_t piece = task / row_tasks * kPieceTiles, begin = task % row_tasks * kTaskRows;
        const int64_t here = tiles - piece < kPieceTiles ? tiles - piece : kPieceTiles;
        const int64_t end = begin + kTaskRows < weight.rows ? begin + kTaskRows : weight.rows;
        for (int64_t panel = begin; panel < end; panel += kPanel)
            multiply_panel(rows, panel, end, packed + piece * stride, here, [&](int64_t tile, const float* sums) {
                const int64_t first = (piece + tile) * kTile, count = tokens - first < kTile ? tokens - first : kTile;
                by_token(sums, panel, end, count, [&](int64_t token, int64_t row, __mmask16 mask, __m512 values) {
                    float* place = out + (first + token) * weight.rows + row;
                    if (bias != nullptr) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, bias + row));
                    if (adds) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, place));
                    _mm512_mask_storeu_ps(place, mask, values);
                });
            });
    });
}

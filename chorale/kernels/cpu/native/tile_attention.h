// Attention of many queries on tiles. Scores and weights are transposed, one query per lane, so that neither
// the softmax nor the second product moves numbers between lanes.
#pragma once

constexpr int64_t kFewestPositions = 9;   // of a sequence in a step; fewer use AVX-512
constexpr int64_t kTilePositions = 32;    // positions per task
constexpr int64_t kKeySteps = kKeys / kGroup;

inline bool fits_tiles(const Step& step) { return step.rounded != 0 && step.head_dim % (4 * kTile) == 0; }

struct Pages {  // kKeys keys and values of a KV head, padded with zeros
    uint16_t* keys;    // [key][dim]
    uint16_t* values;  // [tile of dim][step of 32 keys][dim][key]
};

// 2^v for v <= 0, within 3e-6; 0 below -126, NaN for NaN.
inline __m512 power(__m512 v) {
    const __m512 whole = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(v, whole);
    __m512 sum = _mm512_set1_ps(1.3333558e-3f);
    for (float each : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(each));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ), sum, whole);
}

inline void load_pages(const uint16_t* kv, const Step& step, const int32_t* table, int64_t kv_head, int64_t first,
                       int64_t begin, int64_t end, uint16_t* rows, const Pages& out) {
    const int64_t dim = step.head_dim, part = step.block_size * dim;
    const auto bytes = static_cast<size_t>(dim) * sizeof(uint16_t);
    for (int64_t i = 0; i < kKeys; i++) {
        const int64_t position = first + i;
        if (position < begin || position >= end) {
            std::memset(out.keys + i * dim, 0, bytes);
            std::memset(rows + i * dim, 0, bytes);
            continue;
        }
        const int64_t block = table[position / step.block_size];
        const uint16_t* k = kv + (block * 2 * step.kv_heads + kv_head) * part + position % step.block_size * dim;
        std::memcpy(out.keys + i * dim, k, bytes);
        std::memcpy(rows + i * dim, k + step.kv_heads * part, bytes);
    }
    uint16_t* to = out.values;
    for (int64_t d = 0; d < dim; d += kTile)
        for (int64_t key = 0; key < kKeys; key += kGroup) {
            __m512i pairs[kTile];
            for (int64_t i = 0; i < kTile; i++) {
                const auto* even = reinterpret_cast<const __m256i*>(rows + (key + 2 * i) * dim + d);
                const auto* odd = reinterpret_cast<const __m256i*>(rows + (key + 2 * i + 1) * dim + d);
                const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(odd));
                pairs[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(_mm256_loadu_si256(even)), _mm512_slli_epi32(high, 16));
            }
            transpose(pairs);
            for (int64_t i = 0; i < kTile; i++, to += kGroup) _mm512_store_si512(to, pairs[i]);
        }
}

// Sixteen queries: consecutive heads of a group, then the next position.
struct Queries {
    const uint16_t* packed;  // in the format of ``pack_tile``, in units of log2
    float* sums;             // [dim][query]
    __m512 most, total;
    __m512i position;
    int64_t lowest, highest;  // positions of the queries
};

inline void multiply_keys(const Queries& queries, const uint16_t* keys, int64_t dim, float* scores) {
    zero_sums<4>();
    order_memory();
    const long row = dim * static_cast<long>(sizeof(uint16_t)), next = kTile * dim;
    for (int64_t d = 0; d < dim; d += kGroup, keys += kGroup) {
        _tile_loadd(6, queries.packed + d * kTile, 64);
        _tile_loadd(4, keys, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, keys + next, row);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, keys + 2 * next, row);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, keys + 3 * next, row);
        _tile_dpbf16ps(3, 5, 6);
    }
    store_sums<4>(scores);
    order_memory();
}

inline void hide_keys(const Queries& queries, int64_t first, int64_t window, float* scores) {
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    const __m512i before = _mm512_sub_epi32(queries.position, _mm512_set1_epi32(static_cast<int>(window)));
    for (int64_t i = 0; i < kKeys; i++, scores += kTile) {
        const __m512i key = _mm512_set1_epi32(static_cast<int>(first + i));
        __mmask16 hides = _mm512_cmpgt_epi32_mask(key, queries.position);
        if (window > 0) hides |= _mm512_cmple_epi32_mask(key, before);
        _mm512_store_ps(scores, _mm512_mask_mov_ps(_mm512_load_ps(scores), hides, hidden));
    }
}

// Turns scores [key][query] into weights [step][pair of keys][query][2]; returns the factor for older sums.
inline __m512 soften(Queries& queries, const float* scores, uint16_t* weights) {
    __m512 tops[4] = {queries.most, queries.most, queries.most, queries.most};
    for (int64_t i = 0; i < kKeys; i += 4)
        for (int64_t j = 0; j < 4; j++) tops[j] = _mm512_max_ps(tops[j], _mm512_load_ps(scores + (i + j) * kTile));
    const __m512 next = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    __m512 added[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < kKeys; i += 2) {
        const __m512 even = power(_mm512_sub_ps(_mm512_load_ps(scores + i * kTile), next));
        const __m512 odd = power(_mm512_sub_ps(_mm512_load_ps(scores + (i + 1) * kTile), next));
        added[0] = _mm512_add_ps(added[0], even);
        added[1] = _mm512_add_ps(added[1], odd);
        _mm512_store_si512(weights + i * kTile, paired(even, odd));
    }
    const __m512 factor = power(_mm512_sub_ps(queries.most, next));
    queries.total = _mm512_fmadd_ps(queries.total, factor, _mm512_add_ps(added[0], added[1]));
    queries.most = next;
    return factor;
}

inline void add_weighted(const Queries& queries, __m512 factor, const uint16_t* weights, const uint16_t* values,
                         int64_t dim) {
    if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0)
        for (int64_t d = 0; d < dim; d++) {
            float* sums = queries.sums + d * kTile;
            _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), factor));
        }
    order_memory();
    constexpr int64_t next = kKeySteps * kTileWords;
    for (int64_t d = 0; d < dim; d += 4 * kTile, values += 4 * next) {
        float* sums = queries.sums + d * kTile;
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
        for (int64_t step = 0; step < kKeySteps; step++) {
            const uint16_t* from = values + step * kTileWords;
            _tile_loadd(6, weights + step * kTileWords, 64);
            _tile_loadd(4, from, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, from + next, 64);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(4, from + 2 * next, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, from + 3 * next, 64);
            _tile_dpbf16ps(3, 5, 6);
        }
        store_sums<4>(sums);
    }
    order_memory();
}

// Packs ``count`` queries of a tile, beginning with number ``from``; ``scaled`` is memory for their floats.
inline Queries take_queries(const float* sinks, const Step& step, int64_t kv_head, const Tile& tile, int64_t from,
                            int64_t count, float* scaled, uint16_t* packed, float* sums) {
    constexpr float kLog2E = 1.44269504088896341f;
    const int64_t dim = step.head_dim, group = step.heads / step.kv_heads;
    const float scale = kLog2E / std::sqrt(static_cast<float>(dim));
    const float* rows[kTile];
    alignas(64) float most[kTile];
    alignas(64) int position[kTile];
    for (int64_t i = 0; i < kTile; i++) {
        const int64_t query = from + (i < count ? i : count - 1);
        most[i] = sinks[kv_head * group + query % group] * kLog2E;
        position[i] = static_cast<int>(tile.position + query / group);
        const float* q = tile.q + query / group * step.heads * dim + query % group * dim;
        for (int64_t d = 0; d < dim; d++) scaled[i * dim + d] = q[d] * scale;
        rows[i] = scaled + i * dim;
    }
    pack_tile(rows, count, dim, packed);
    std::memset(sums, 0, static_cast<size_t>(dim * kTile) * sizeof(float));
    return {packed, sums, _mm512_load_ps(most), _mm512_set1_ps(1.0f), _mm512_load_si512(position), position[0],
            position[kTile - 1]};
}

inline void give_queries(const Queries& queries, const Step& step, const Tile& tile, int64_t from, int64_t count) {
    const int64_t dim = step.head_dim, group = step.heads / step.kv_heads;
    const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), queries.total);
    for (int64_t d = 0; d < dim; d += kTile) {
        __m512i values[kTile];
        for (int64_t i = 0; i < kTile; i++)
            values[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(queries.sums + (d + i) * kTile), factor);
        transpose(values);
        for (int64_t i = 0; i < count; i++) {
            float* out = tile.out + (from + i) / group * step.heads * dim + (from + i) % group * dim;
            _mm512_storeu_ps(out + d, (__m512)values[i]);
        }
    }
}

inline void attend_on_tiles(const uint16_t* kv, const float* sinks, const Step& step, const int32_t* table,
                            int64_t kv_head, const Tile& tile) {
    static thread_local Space<Queries> taken;
    static thread_local Space<uint16_t> packed_space, page_space;
    static thread_local Space<float> sums_space, scaled_space;
    alignas(64) float scores[kKeys * kTile];
    alignas(64) uint16_t weights[kKeys * kTile];
    const TileShapes shapes;
    const int64_t dim = step.head_dim, count = tile.num_positions * (step.heads / step.kv_heads);
    const int64_t tiles = num_tiles(count), words = dim * kTile;
    Queries* queries = taken.take(tiles);
    uint16_t *packed = packed_space.take(tiles * words), *rows = page_space.take(3 * kKeys * dim);
    float *sums = sums_space.take(tiles * words), *scaled = scaled_space.take(words);
    const Pages pages{rows + kKeys * dim, rows + 2 * kKeys * dim};
    auto left = [&](int64_t i) { return count - i * kTile < kTile ? count - i * kTile : kTile; };
    for (int64_t i = 0; i < tiles; i++)
        queries[i] = take_queries(sinks, step, kv_head, tile, i * kTile, left(i), scaled, packed + i * words, sums + i * words);
    const int64_t end = tile.position + tile.num_positions, window = step.window;  // keys before end are visible
    const int64_t begin = window > 0 && tile.position >= window ? tile.position - window + 1 : 0;
    // Starts at a multiple of kKeys, so that a query's sums have the same order in any tile.
    for (int64_t first = begin / kKeys * kKeys; first < end; first += kKeys) {
        load_pages(kv, step, table, kv_head, first, begin, end, rows, pages);
        for (int64_t i = 0; i < tiles; i++) {
            Queries& some = queries[i];
            const int64_t last = first + kKeys - 1;
            if (first > some.highest || (window > 0 && last <= some.lowest - window)) continue;  // not visible
            multiply_keys(some, pages.keys, dim, scores);
            if (last > some.lowest || (window > 0 && first <= some.highest - window))
                hide_keys(some, first, window, scores);
            add_weighted(some, soften(some, scores, weights), weights, pages.values, dim);
        }
    }
    for (int64_t i = 0; i < tiles; i++) give_queries(queries[i], step, tile, i * kTile, left(i));
}

// Rotary, the paged cache, and attention with sinks and windows.
#pragma once

constexpr int kKeys = 64;     // keys processed at once
constexpr int kQueries = 8;   // queries that are processed with the same keys

template <class Number> void put(float value, Number* out);
template <> inline void put(float value, float* out) { *out = value; }
template <> inline void put(float value, uint16_t* out) { *out = to_bfloat16(value); }

inline void rotate(const float* in, const float* rope, int64_t dim, float* out) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float left = in[i], right = in[i + half], cos = rope[i], sin = rope[i + half];
        out[i] = left * cos - right * sin;
        out[i + half] = right * cos + left * sin;
    }
}

template <class Number>
void cache_token(const float* qkv, const float* rope, const Step& step, int64_t token, Number* kv, float* q) {
    const int64_t dim = step.head_dim, block = step.slots[token] / step.block_size;
    const int64_t offset = step.slots[token] % step.block_size, part = step.block_size * dim;
    for (int64_t head = 0; head < step.heads; head++) rotate(qkv + head * dim, rope, dim, q + head * dim);
    static thread_local Space<float> space;
    float* key = space.take(dim);
    for (int64_t head = 0; head < step.kv_heads; head++) {
        rotate(qkv + (step.heads + head) * dim, rope, dim, key);
        const float* value = qkv + (step.heads + step.kv_heads + head) * dim;
        Number* k = kv + (block * 2 * step.kv_heads + head) * part + offset * dim;
        Number* v = k + step.kv_heads * part;
        for (int64_t i = 0; i < dim; i++) {
            put(key[i], k + i);
            put(value[i], v + i);
        }
    }
}

void rotate_and_cache(const float* qkv, int64_t tokens, const float* rope, const Step* step, void* kv,
                      int32_t element, float* q) {
    const int64_t width = (step->heads + 2 * step->kv_heads) * step->head_dim, at_once = 8;
    chorale::parallel((tokens + at_once - 1) / at_once, [&](long task) {
        for (int64_t token = task * at_once; token < (task + 1) * at_once && token < tokens; token++) {
            const float *from = qkv + token * width, *angles = rope + token * step->head_dim;
            float* to = q + token * step->heads * step->head_dim;
            if (element == kBfloat16) cache_token(from, angles, *step, token, static_cast<uint16_t*>(kv), to);
            else cache_token(from, angles, *step, token, static_cast<float*>(kv), to);
        }
    });
}

// The queries of one task: consecutive positions of one sequence, for the heads that share a KV head.
struct Tile {
    const float* q;  // the first query of the first of these heads
    float* out;
    int64_t position;  // position of the first query
    int64_t num_positions;
};

// Memory of one task: ``keys`` holds dimensions of kKeys keys, transposed.
struct TileSpace {
    Space<float> queries, keys, values, weights, sums, most, total;
};

template <class Number>
void load_keys(const Number* kv, const Step& step, const int32_t* table, int64_t kv_head, int64_t first, int64_t begin,
               int64_t end, float* keys, float* values) {
    const int64_t dim = step.head_dim, part = step.block_size * dim;
    for (int64_t i = 0; i < kKeys; i++) {
        if (first + i < begin || first + i >= end) {
            for (int64_t d = 0; d < dim; d++) keys[d * kKeys + i] = values[i * dim + d] = 0.0f;
            continue;
        }
        const int64_t position = first + i, block = table[position / step.block_size];
        const Number* k = kv + (block * 2 * step.kv_heads + kv_head) * part + position % step.block_size * dim;
        const Number* v = k + step.kv_heads * part;
        for (int64_t d = 0; d < dim; d++) keys[d * kKeys + i] = to_float(k[d]);
        for (int64_t d = 0; d < dim; d++) values[i * dim + d] = to_float(v[d]);
    }
}

// scores[q][kKeys] of up to kQueries queries, each of ``dim`` floats.
template <int Q> inline void score(const float* queries, int64_t dim, const float* keys, float* scores) {
    for (int part = 0; part < kKeys / kLanes; part++) {
        Floats sums[Q];
        for (int q = 0; q < Q; q++) sums[q] = splat(0.0f);
        for (int64_t d = 0; d < dim; d++) {
            const Floats key = load(keys + d * kKeys + part * kLanes);
            for (int q = 0; q < Q; q++) sums[q] += key * queries[q * dim + d];
        }
        for (int q = 0; q < Q; q++) store(scores + q * kKeys + part * kLanes, sums[q]);
    }
}

// sums[q][dim] = sums * factor[q] + weights[q] values
template <int Q>
inline void add_values(const float* weights, const float* values, int64_t dim, int64_t count, const float* factor,
                       float* sums) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
        Floats parts[Q];
        for (int q = 0; q < Q; q++) parts[q] = load(sums + q * dim + d) * factor[q];
        for (int64_t i = 0; i < count; i++) {
            const Floats value = load(values + i * dim + d);
            for (int q = 0; q < Q; q++) parts[q] += value * weights[q * kKeys + i];
        }
        for (int q = 0; q < Q; q++) store(sums + q * dim + d, parts[q]);
    }
    for (; d < dim; d++)
        for (int q = 0; q < Q; q++) {
            float part = sums[q * dim + d] * factor[q];
            for (int64_t i = 0; i < count; i++) part += values[i * dim + d] * weights[q * kKeys + i];
            sums[q * dim + d] = part;
        }
}

// Turns scores of keys first... into weights relative to the new maximum; returns the factor for older sums.
inline float soften(float* scores, int64_t position, int64_t first, int64_t count, int64_t window, float& most,
                    float& total) {
    for (int64_t i = 0; i < kKeys; i++) {
        const int64_t key = first + i;
        if (i >= count || key > position || (window > 0 && key <= position - window)) scores[i] = -INFINITY;
    }
    Floats top = load(scores);
    for (int part = 1; part < kKeys / kLanes; part++) top = max(top, load(scores + part * kLanes));
    const float found = largest(top), next = found > most ? found : most;
    const float factor = std::exp(most - next);
    Floats added = splat(0.0f);
    for (int part = 0; part < kKeys / kLanes; part++) {
        const Floats weight = exp(load(scores + part * kLanes) - next);
        store(scores + part * kLanes, weight);
        added += weight;
    }
    total = total * factor + sum(added);
    most = next;
    return factor;
}

template <class Number>
void attend(const Number* kv, const float* sinks, const Step& step, const int32_t* table, int64_t kv_head,
            const Tile& tile) {
    static thread_local TileSpace space;
    const int64_t dim = step.head_dim, group = step.heads / step.kv_heads, count = tile.num_positions * group;
    const int64_t padded = (count + kQueries - 1) / kQueries * kQueries;
    float *queries = space.queries.take(padded * dim), *sums = space.sums.take(padded * dim);
    float *keys = space.keys.take(kKeys * dim), *values = space.values.take(kKeys * dim);
    float *most = space.most.take(padded), *total = space.total.take(padded);
    float* weights = space.weights.take(kQueries * kKeys);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    std::memset(queries, 0, static_cast<size_t>(padded * dim) * sizeof(float));
    std::memset(sums, 0, static_cast<size_t>(padded * dim) * sizeof(float));
    for (int64_t i = 0; i < padded; i++) {
        const int64_t head = kv_head * group + i % group;
        most[i] = i < count ? sinks[head] : 0.0f;
        total[i] = 1.0f;  // the sink's weight
        if (i >= count) continue;
        const float* q = tile.q + (i / group) * step.heads * dim + (i % group) * dim;
        for (int64_t d = 0; d < dim; d++) queries[i * dim + d] = q[d] * scale;
    }
    const int64_t end = tile.position + tile.num_positions;  // keys before this position are visible
    const int64_t begin = step.window > 0 && tile.position >= step.window ? tile.position - step.window + 1 : 0;
    // Starts at a multiple of kKeys, so that a query's sums have the same order in any tile.
    for (int64_t first = begin / kKeys * kKeys; first < end; first += kKeys) {
        const int64_t seen = end - first < kKeys ? end - first : kKeys;
        load_keys(kv, step, table, kv_head, first, begin, end, keys, values);
        for (int64_t query = 0; query < padded; query += kQueries) {
            float factors[kQueries];
            score<kQueries>(queries + query * dim, dim, keys, weights);
            for (int q = 0; q < kQueries; q++) {
                const int64_t at = query + q < count ? query + q : count - 1;
                factors[q] = soften(weights + q * kKeys, tile.position + at / group, first, seen, step.window,
                                    most[query + q], total[query + q]);
            }
            add_values<kQueries>(weights, values, dim, seen, factors, sums + query * dim);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        float* out = tile.out + (i / group) * step.heads * dim + (i % group) * dim;
        const float factor = 1.0f / total[i];
        for (int64_t d = 0; d < dim; d++) out[d] = sums[i * dim + d] * factor;
    }
}

#if defined(CHORALE_TILES)
#include "tile_attention.h"
#else
constexpr int64_t kFewestPositions = INT64_MAX, kTilePositions = 1;
inline bool fits_tiles(const Step&) { return false; }
inline void attend_on_tiles(const uint16_t*, const float*, const Step&, const int32_t*, int64_t, const Tile&) {}
#endif

void attention(const float* q, const void* kv, int32_t element, const float* sinks, const Step* step, float* out) {
    struct Part {
        int64_t row, position, count;
        bool on_tiles;
    };
    static thread_local std::vector<Part> parts;
    parts.clear();
    const bool may_use_tiles = element == kBfloat16 && fits_tiles(*step);
    for (int64_t row = 0; row < step->num_rows; row++) {
        const int64_t tokens = step->query_start[row + 1] - step->query_start[row];
        const bool on_tiles = may_use_tiles && tokens >= kFewestPositions;
        const int64_t at_once = on_tiles ? kTilePositions : 16;  // positions per task
        for (int64_t done = 0; done < tokens; done += at_once)
            parts.push_back({row, done, tokens - done < at_once ? tokens - done : at_once, on_tiles});
    }
    const auto& all = parts;
    chorale::parallel(static_cast<int64_t>(all.size()) * step->kv_heads, [&](long task) {
        // The last positions of a prompt see the most keys, so they come first.
        const Part& part = all[all.size() - 1 - static_cast<size_t>(task / step->kv_heads)];
        const int64_t kv_head = task % step->kv_heads, group = step->heads / step->kv_heads;
        const int64_t token = step->query_start[part.row] + part.position;
        const int64_t tokens = step->query_start[part.row + 1] - step->query_start[part.row];
        const int64_t place = (token * step->heads + kv_head * group) * step->head_dim;
        const Tile tile{q + place, out + place, step->context_lens[part.row] - tokens + part.position, part.count};
        const int32_t* table = step->block_table + part.row * step->width;
        if (part.on_tiles) attend_on_tiles(static_cast<const uint16_t*>(kv), sinks, *step, table, kv_head, tile);
        else if (element == kBfloat16) attend(static_cast<const uint16_t*>(kv), sinks, *step, table, kv_head, tile);
        else attend(static_cast<const float*>(kv), sinks, *step, table, kv_head, tile);
    });
}

// Dense products: packing, and out = norm(x) W^T + bias.
#pragma once

// Weights per task: few, so that they stay in a core's cache for all tokens; or many, as one long stream for
// few tokens.
constexpr int64_t kFewBytes = 96 * 1024, kManyBytes = 512 * 1024, kTasksOfThread = 16;

// ``rows``: rows of all matrices together; ``tokens``: the maximum of any matrix.
inline int64_t rows_of_task(int64_t row_bytes, int64_t rows, int64_t tokens) {
    int64_t bytes = tokens > kTokens ? 0 : row_bytes * rows / (kTasksOfThread * chorale::Pool::shared().num_threads());
    bytes = bytes < kFewBytes ? kFewBytes : bytes > kManyBytes ? kManyBytes : bytes;
    const int64_t found = bytes / (row_bytes > 0 ? row_bytes : 1) / 4 * 4;
    return found < 8 ? 8 : found > 512 ? 512 : found;
}

template <class Number> void pack_row(const Number* source, int64_t columns, unsigned char* out) {
    const int64_t steps = num_steps(columns);
    std::memset(out, 0, static_cast<size_t>(Int8Rows::row_bytes(columns)));
    auto* scales = reinterpret_cast<uint16_t*>(out + steps * kBlocks * kGroup);
    for (int64_t group = 0; group < steps * kBlocks; group++) {
        const int64_t left = columns - group * kGroup, count = left < 0 ? 0 : left < kGroup ? left : kGroup;
        float values[kGroup] = {}, most = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            values[i] = to_float(source[group * kGroup + i]);
            const float size = std::fabs(values[i]);
            most = size > most || size != size ? size : most;
        }
        // The scale is rounded up, so that no quotient exceeds 127.
        uint16_t scale = to_bfloat16(most / 127.0f);
        if (to_float(scale) * 127.0f < most) scale++;
        scales[group] = scale;
        const float inverse = to_float(scale) > 0.0f ? 1.0f / to_float(scale) : 0.0f;
        unsigned char* step = out + group / kBlocks * kBlocks * kGroup + group % kBlocks * 16;
        for (int i = 0; i < kGroup; i++) {
            const int value = static_cast<int>(values[i] * inverse + 12582912.0f - 12582912.0f);
            step[i / 2 + (i & 1) * 16 * kBlocks] = static_cast<unsigned char>(value + Isa::kOffset8);
        }
    }
}

void pack(const void* source, int32_t element, int64_t rows, int64_t columns, void* out) {
    const int64_t stride = Int8Rows::row_bytes(columns), at_once = 64;
    chorale::parallel((rows + at_once - 1) / at_once, [&](long task) {
        for (int64_t row = task * at_once; row < (task + 1) * at_once && row < rows; row++) {
            unsigned char* to = static_cast<unsigned char*>(out) + row * stride;
            if (element == kBfloat16) pack_row(static_cast<const uint16_t*>(source) + row * columns, columns, to);
            else pack_row(static_cast<const float*>(source) + row * columns, columns, to);
        }
    });
}

int64_t packed_bytes(int64_t columns) { return Int8Rows::row_bytes(columns); }

inline int64_t bytes_of_row(const Matrix& matrix) {
    switch (matrix.element) {
        case kFloat32: return matrix.columns * 4;
        case kBfloat16: return matrix.columns * 2;
        case kInt8: return Int8Rows::row_bytes(matrix.columns);
        default: return num_groups(matrix.columns) * 17;
    }
}

inline void get(const Inputs& inputs, int64_t token, const RoundedStep*& one) { one = inputs.rounded(token); }
inline void get(const Inputs& inputs, int64_t token, const float*& one) { one = inputs.exact(token); }

template <class Rows>
void linear_rows(const Matrix& weight, const Inputs& inputs, int64_t tokens, float* out, bool adds) {
    const Rows rows(weight);
    static thread_local Space<typename Rows::Input> space;
    typename Rows::Input* x = space.take(tokens);
    for (int64_t token = 0; token < tokens; token++) get(inputs, token, x[token]);
    const auto* bias = static_cast<const float*>(weight.bias);
    const int64_t at_once = rows_of_task(bytes_of_row(weight), weight.rows, tokens);
    chorale::parallel((weight.rows + at_once - 1) / at_once, [&, x](long task) {
        const int64_t begin = task * at_once, end = begin + at_once < weight.rows ? begin + at_once : weight.rows;
        multiply_all(rows, begin, end, x, tokens, [&](int64_t row, int64_t token, float value) {
            float& place = out[token * weight.rows + row];
            if (bias != nullptr) value += bias[row];
            place = adds ? place + value : value;
        });
    });
}

#if defined(CHORALE_TILES)
#include "tile_dense.h"
#endif

void linear(const float* x, int64_t tokens, const float* norm, float eps, const Matrix* weight, float* out,
            int32_t adds) {
#if defined(CHORALE_TILES)
    if (weight->element == kInt8 && !weight->fixed && tokens >= kFewest8) return linear_tiles(x, tokens, norm, eps, *weight, out, adds);
#endif
    static thread_local Inputs inputs;
    if (norm == nullptr) {
        inputs.fill(tokens, *weight, [&](int64_t token) { return x + token * weight->columns; });
    } else {
        inputs.fill(tokens, *weight, [&](int64_t token) {
            static thread_local Space<float> space;
            float* normed = space.take(weight->columns);
            norm_row(x + token * weight->columns, weight->columns, norm, eps, normed);
            return normed;
        });
    }
    if (weight->element == kMxfp4 && weight->exact) linear_rows<Mxfp4ExactRows>(*weight, inputs, tokens, out, adds);
    else if (weight->element == kMxfp4) linear_rows<Mxfp4Rows>(*weight, inputs, tokens, out, adds);
    else if (weight->element == kInt8) linear_rows<Int8Rows>(*weight, inputs, tokens, out, adds);
    else if (weight->element == kBfloat16) linear_rows<DenseRows<uint16_t>>(*weight, inputs, tokens, out, adds);
    else linear_rows<DenseRows<float>>(*weight, inputs, tokens, out, adds);
}

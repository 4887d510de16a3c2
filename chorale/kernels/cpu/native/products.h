// Rows of a matrix times rows of inputs: R rows of weights and M tokens at a time stay in registers.
#pragma once

// Weights are prefetched into the L2 cache, by ascending address regardless of the order of the products,
// because processors handle one ascending stream best. Prefetching into L1, or by rows, is a fifth slower
// with one token (Granite Rapids, two threads).
constexpr int64_t kAheadBytes = 16384;
inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// One step of a row's weights: bytes for the even and the odd inputs, and the blocks' scales.
struct Decoded {
    Isa::Bytes lo, hi;
    Isa::Floats scale;
};

inline int64_t stride_of(const Matrix& matrix) { return matrix.stride > 0 ? matrix.stride : matrix.columns; }

struct Mxfp4 {  // the rows of a matrix, beginning with row ``first``
    const unsigned char *blocks, *scales;
    int64_t groups, stride;  // of a row, and from one row to the next

    explicit Mxfp4(const Matrix& matrix, int64_t first = 0)
        : groups(num_groups(matrix.columns)), stride(num_groups(stride_of(matrix))) {
        blocks = static_cast<const unsigned char*>(matrix.data) + first * stride * 16;
        scales = static_cast<const unsigned char*>(matrix.scales) + first * stride;
    }
};

struct Mxfp4Rows : Mxfp4 {
    using Input = const RoundedStep*;
    using Mxfp4::Mxfp4;

    int64_t full_steps() const { return groups / kBlocks; }
    int rest() const { return static_cast<int>(groups % kBlocks); }
    // For step ``part`` of the rows that begin with ``row``, counted over all of them.
    void ask(int64_t row, int64_t part) const {
        prefetch(blocks + (row * groups + part * kBlocks) * 16 + kAheadBytes);
        if (part % (64 / kBlocks) == 0) prefetch(scales + row * groups + part * kBlocks + kAheadBytes / 16);
    }
    Decoded at(int64_t row, int64_t step) const {
        const int64_t place = row * stride + step * kBlocks;
        Decoded found;
        Isa::decode4(Isa::load_unaligned(blocks + place * 16), found.lo, found.hi);
        found.scale = Isa::scales4(scales + place);
        return found;
    }
    Decoded last(int64_t row) const {  // fewer than kBlocks blocks: reads nothing beyond the row
        const int64_t place = row * stride + full_steps() * kBlocks;
        unsigned char few[kBlocks] = {};
        for (int i = 0; i < rest(); i++) few[i] = scales[place + i];
        Decoded found;
        Isa::decode4(Isa::load_blocks(blocks + place * 16, rest()), found.lo, found.hi);
        found.scale = Isa::scales4(few);
        return found;
    }
    static Isa::Ints dot(Isa::Ints sum, const Decoded& weights, const RoundedStep& x) {
        return Isa::dot(Isa::dot(sum, weights.lo, Isa::load(x.lo)), weights.hi, Isa::load(x.hi));
    }
    static constexpr float kFactor = 0.5f;  // decoded values are doubled
};

// Rows in the format of ``pack_row``: bytes of all steps, then bfloat16 scales.
struct Int8Rows {
    using Input = const RoundedStep*;
    const unsigned char* data;
    int64_t steps, stride;

    explicit Int8Rows(const Matrix& matrix, int64_t first = 0)
        : steps(num_steps(matrix.columns)), stride(row_bytes(matrix.columns)) {
        data = static_cast<const unsigned char*>(matrix.data) + first * stride;
    }
    static int64_t row_bytes(int64_t columns) {
        return (num_steps(columns) * kBlocks * (kGroup + 2) + 63) / 64 * 64;
    }
    int64_t full_steps() const { return steps; }
    int rest() const { return 0; }
    // For step ``part`` of the rows that begin with ``row``, counted over all of them.
    void ask(int64_t row, int64_t part) const {
        const unsigned char* at = data + row * stride + part * kBlocks * kGroup + kAheadBytes;
        for (int i = 0; i < kBlocks * kGroup; i += 64) prefetch(at + i);
    }
    Decoded at(int64_t row, int64_t step) const {
        const unsigned char* bytes = data + row * stride;
        const unsigned char* scales = bytes + steps * kBlocks * kGroup + step * kBlocks * 2;
        bytes += step * kBlocks * kGroup;
        return {Isa::load_unaligned(bytes), Isa::load_unaligned(bytes + kBlocks * kGroup / 2),
                Isa::scales8(reinterpret_cast<const unsigned short*>(scales))};
    }
    Decoded last(int64_t row) const { return at(row, 0); }
    static Isa::Ints dot(Isa::Ints sum, const Decoded& weights, const RoundedStep& x) {
        return Isa::dot8(Isa::dot8(sum, weights.lo, Isa::load(x.lo)), weights.hi, Isa::load(x.hi));
    }
    static constexpr float kFactor = 1.0f;
};

template <int R, int M, class Rows>
inline void add_step(const Decoded (&weights)[R], const RoundedStep* const* x, int64_t step,
                     Isa::Floats (&sums)[R][M]) {
    for (int m = 0; m < M; m++) {
        const RoundedStep& inputs = x[m][step];
        Isa::Ints start;
        std::memcpy(&start, inputs.start, sizeof start);
        const Isa::Floats scale = Isa::load_floats(inputs.scale);
        for (int r = 0; r < R; r++)
            sums[r][m] = Isa::add_scaled(sums[r][m], Rows::dot(start, weights[r], inputs), weights[r].scale, scale);
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kRows = 4;  // at once, of several tokens

// out[r][m] = row ``row + r`` of the weights times token m. A single row or token is paired with itself or
// with zeros, so its sum does not depend on other rows or tokens.
template <int R, int M, class Rows>
inline void multiply(const Rows& rows, int64_t row, const RoundedStep* const* x, float (&out)[R][M]) {
    constexpr int kRowPairs = (R + 1) / 2, kTokenPairs = (M + 1) / 2;
    static const RoundedStep zeros = {};
    Isa::Floats sums[kRowPairs][kTokenPairs];
    for (auto& some : sums)
        for (Isa::Floats& sum : some) sum = Isa::zero();
    const int64_t steps = rows.full_steps();
    for (int64_t step = 0; step < steps; step++) {
        Isa::Pair inputs[kTokenPairs];
        for (int pair = 0; pair < kTokenPairs; pair++) {
            const RoundedStep &a = x[2 * pair][step], &b = 2 * pair + 1 < M ? x[(2 * pair + 1) % M][step] : zeros;
            inputs[pair] = Isa::inputs(a.lo, a.hi, a.scale, b.lo, b.hi, b.scale);
        }
        for (int pair = 0; pair < kRowPairs; pair++) {
            const int next = 2 * pair + 1 < R ? 1 : 0;
            for (int r = 2 * pair; r <= 2 * pair + next; r++) rows.ask(row, step * R + r);
            const Decoded a = rows.at(row + 2 * pair, step), b = rows.at(row + 2 * pair + next, step);
            const Isa::Pair weights = Isa::rows(a.lo, a.hi, a.scale, b.lo, b.hi, b.scale);
            for (int m = 0; m < kTokenPairs; m++) sums[pair][m] = Isa::add_pairs(sums[pair][m], weights, inputs[m]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) {
            float four[4];
            Isa::store(four, sums[r / 2][m / 2]);
            out[r][m] = four[r % 2 * 2 + m % 2] * Rows::kFactor;
        }
}
#else
constexpr int kRows = 2;  // at once, of several tokens

// out[r][m] = row ``row + r`` of the weights times token m.
template <int R, int M, class Rows>
inline void multiply(const Rows& rows, int64_t row, const RoundedStep* const* x, float (&out)[R][M]) {
    Isa::Floats sums[R][M];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sums[r][m] = Isa::zero();
    const int64_t steps = rows.full_steps();
    Decoded weights[R];
    for (int64_t step = 0; step < steps; step++) {
        for (int r = 0; r < R; r++) {
            rows.ask(row, step * R + r);
            weights[r] = rows.at(row + r, step);
        }
        add_step<R, M, Rows>(weights, x, step, sums);
    }
    if (rows.rest() > 0) {
        for (int r = 0; r < R; r++) weights[r] = rows.last(row + r);
        add_step<R, M, Rows>(weights, x, steps, sums);
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) out[r][m] = Isa::sum(sums[r][m]) * Rows::kFactor;
}
#endif

// Exact products: weights become float32, inputs stay float32.
struct Mxfp4ExactRows : Mxfp4 {
    using Input = const float*;
    using Mxfp4::Mxfp4;

    template <int M> void multiply(int64_t row, const float* const* x, Floats (&sums)[M], float (&rest)[M]) const {
        constexpr int kParts = 16 / kLanes;
        for (int m = 0; m < M; m++) rest[m] = 0.0f;
        for (int64_t group = 0; group < groups; group++) {
            Isa::Floats even[kParts], odd[kParts];
            if (group % 4 == 0) prefetch(blocks + (row * groups + group) * 16 + kAheadBytes);
            Isa::decode_floats(blocks + (row * stride + group) * 16, even, odd);
            const unsigned char exponent = scales[row * stride + group];
            const uint32_t bits = exponent == 0 ? 1u << 22 : exponent == 255 ? 0x7FC00000u : exponent << 23u;
            float factor;
            std::memcpy(&factor, &bits, 4);
            for (int m = 0; m < M; m++) {
                const float* inputs = x[m] + group * kGroup;
                Floats block = splat(0.0f);
                for (int i = 0; i < kParts; i++)
                    block += (Floats)even[i] * load(inputs + i * kLanes) + (Floats)odd[i] * load(inputs + 16 + i * kLanes);
                sums[m] += block * factor;
            }
        }
    }
};

template <class Number> struct DenseRows {
    using Input = const float*;
    const Number* data;
    int64_t columns, stride;

    explicit DenseRows(const Matrix& matrix, int64_t first = 0) : columns(matrix.columns), stride(stride_of(matrix)) {
        data = static_cast<const Number*>(matrix.data) + first * stride;
    }
    template <int M> void multiply(int64_t row, const float* const* x, Floats (&sums)[M], float (&rest)[M]) const {
        const Number* weights = data + row * stride;
        int64_t i = 0;
        for (; i + kLanes <= columns; i += kLanes) {
            prefetch(weights + i + kAheadBytes / static_cast<int64_t>(sizeof(Number)));
            const Floats w = load(weights + i);
            for (int m = 0; m < M; m++) sums[m] += w * load(x[m] + i);
        }
        for (int m = 0; m < M; m++) rest[m] = 0.0f;
        for (; i < columns; i++)
            for (int m = 0; m < M; m++) rest[m] += to_float(weights[i]) * x[m][i];
    }
};

template <int R, int M, class Rows>
inline void multiply(const Rows& rows, int64_t row, const float* const* x, float (&out)[R][M]) {
    for (int r = 0; r < R; r++) {
        Floats sums[M];
        float rest[M];
        for (int m = 0; m < M; m++) sums[m] = splat(0.0f);
        rows.template multiply<M>(row + r, x, sums, rest);
        for (int m = 0; m < M; m++) out[r][m] = sum(sums[m]) + rest[m];
    }
}

constexpr int kTokens = 4;  // processed at once

// Calls sink(row, place, value) for rows [begin, end) and all tokens, whose inputs are x[place].
template <int R, int M, class Rows, class Sink>
inline void multiply_some(const Rows& rows, int64_t begin, int64_t end, const typename Rows::Input* x, int64_t place,
                          const Sink& sink) {
    int64_t row = begin;
    for (; row + R <= end; row += R) {
        float out[R][M];
        multiply<R, M>(rows, row, x, out);
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) sink(row + r, place + m, out[r][m]);
    }
    for (; row < end; row++) {
        float out[1][M];
        multiply<1, M>(rows, row, x, out);
        for (int m = 0; m < M; m++) sink(row, place + m, out[0][m]);
    }
}

template <class Rows, class Sink>
inline void multiply_all(const Rows& rows, int64_t begin, int64_t end, const typename Rows::Input* x, int64_t tokens,
                         const Sink& sink) {
    int64_t place = 0;
    for (; place + kTokens <= tokens; place += kTokens)
        multiply_some<kRows, kTokens>(rows, begin, end, x + place, place, sink);
    switch (tokens - place) {
        case 3: multiply_some<kRows, 3>(rows, begin, end, x + place, place, sink); break;
        case 2: multiply_some<kRows, 2>(rows, begin, end, x + place, place, sink); break;
        case 1: multiply_some<4, 1>(rows, begin, end, x + place, place, sink); break;
    }
}

// Products of many tokens on AMX tiles. Weights are decoded to bfloat16 in their order, 16 rows and 32 inputs
// per tile; inputs are rounded to bfloat16 and packed once for all rows; sums are float32 over a whole row.
#pragma once

constexpr int64_t kTile = 16;                   // rows per tile, and tokens per tile
constexpr int64_t kTileWords = kTile * kGroup;  // numbers per tile
constexpr int64_t kPanel = 2 * kTile;           // rows of weights decoded at a time
constexpr int64_t kAhead = 2;                   // decoding is this many steps of 32 inputs ahead of products

inline int64_t num_tiles(int64_t tokens) { return (tokens + kTile - 1) / kTile; }

// GCC's intrinsics do not declare that tiles read memory.
inline void order_memory() { asm volatile("" ::: "memory"); }

// The tile configuration of a thread. It is released after use, so that the system need not save tiles when
// it suspends the thread.
class TileShapes {
  public:
    TileShapes() { _tile_loadconfig(&kShapes); }
    ~TileShapes() { _tile_release(); }
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;

  private:
    struct alignas(64) Shapes {
        unsigned char palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        unsigned char rows[16];
    };
    static constexpr Shapes kShapes = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};

// Decodes MXFP4 to bfloat16 exactly. The table has the 16 values twice, because an index has one bit more
// than a code.
struct alignas(64) ScaledValues {
    uint16_t of[256][2 * 16];
    ScaledValues() {
        static const float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        for (int exponent = 0; exponent < 256; exponent++)
            for (int code = 0; code < 32; code++) {
                const float size = std::ldexp(exponent == 255 ? NAN : values[code & 7], exponent - 127);
                of[exponent][code] = to_bfloat16((code & 8) != 0 ? -size : size);
            }
    }
    static const ScaledValues& shared() {
        static const ScaledValues values;
        return values;
    }
};

struct Mxfp4Tiles : Mxfp4 {
    const ScaledValues& values = ScaledValues::shared();
    __m512i bytes, shifts;

    explicit Mxfp4Tiles(const Matrix& matrix, int64_t first = 0) : Mxfp4(matrix, first) {
        alignas(64) unsigned char twice[64];
        for (int i = 0; i < 64; i++) twice[i] = static_cast<unsigned char>(i / 4);
        bytes = _mm512_load_si512(twice);
        shifts = _mm512_set1_epi32(4 << 16);
    }
    int64_t num_steps() const { return groups; }
    // Decodes rows [from, to) of the panel that begins with row ``begin``.
    void decode(int64_t begin, int64_t from, int64_t to, int64_t step, uint16_t* out) const {
        const unsigned char* at = blocks + ((begin + from) * groups + step) * 16;
        const unsigned char* scale = scales + (begin + from) * groups + step;
        out += from * kGroup;
        for (int64_t row = from; row < to; row++, at += groups * 16, scale += groups, out += kGroup) {
            if (step % 4 == 0) __builtin_prefetch(at + kPanel * groups * 16, 0, 2);
            const __m512i packed = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
            const __m512i codes = _mm512_srlv_epi16(_mm512_permutexvar_epi8(bytes, packed), shifts);
            _mm512_store_si512(out, _mm512_permutexvar_epi16(codes, _mm512_load_si512(values.of[*scale])));
        }
    }
};

// Rounded weights times their scales, rounded to bfloat16.
struct Int8Tiles : Int8Rows {
    int64_t groups;

    explicit Int8Tiles(const Matrix& matrix) : Int8Rows(matrix), groups(num_groups(matrix.columns)) {}
    int64_t num_steps() const { return groups; }
    void decode(int64_t begin, int64_t from, int64_t to, int64_t step, uint16_t* out) const {
        const unsigned char* first = data + (begin + from) * stride;
        const unsigned char* at = first + step / kBlocks * kBlocks * kGroup + step % kBlocks * 16;
        const unsigned char* scales = first + steps * kBlocks * kGroup + step * 2;
        for (int64_t row = from; row < to; row++, at += stride, scales += stride) {
            if (step % kBlocks < 2) __builtin_prefetch(at + kPanel * stride + step % kBlocks * 64, 0, 2);
            uint16_t scale;
            std::memcpy(&scale, scales, 2);
            const __m512 factor = _mm512_set1_ps(to_float(scale));
            const __m128i even = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
            const __m128i odd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + kBlocks * 16));
            const __m512 low = widened(_mm_unpacklo_epi8(even, odd), factor);
            const __m512 high = widened(_mm_unpackhi_epi8(even, odd), factor);
            _mm512_store_si512(out + row * kGroup, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
    static __m512 widened(__m128i bytes, __m512 factor) {
        const __m512i values = _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(Isa::kOffset8));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(values), factor);
    }
};

// Interleaves ``even`` and ``odd`` as bfloat16.
inline __m512i paired(__m512 even, __m512 odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

inline void transpose(__m512i (&v)[16]) {  // 16 rows of 16 32-bit numbers
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0xDD);
        }
    for (int j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        v[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xDD);
    }
}

// Inputs of a tile's tokens for all steps: [step][pair of inputs][token][2] bfloat16, padded with zeros.
inline void pack_tile(const float* const* x, int64_t tokens, int64_t columns, uint16_t* out) {
    for (int64_t step = 0; step < num_groups(columns); step++, out += kTileWords) {
        const int64_t from = step * kGroup, count = columns - from < kGroup ? columns - from : kGroup;
        const auto low = static_cast<__mmask16>(count < 16 ? (1 << count) - 1 : 0xFFFF);
        const auto high = static_cast<__mmask16>(count > 16 ? (1 << (count - 16)) - 1 : 0);
        __m512i rows[kTile];
        for (int64_t i = 0; i < kTile; i++) {
            if (i >= tokens) {
                rows[i] = _mm512_setzero_si512();
                continue;
            }
            const __m512 first = _mm512_maskz_loadu_ps(low, x[i] + from);
            rows[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, x[i] + from + 16), first);
        }
        transpose(rows);
        for (int64_t i = 0; i < kTile; i++) _mm512_store_si512(out + i * 2 * kTile, rows[i]);
    }
}

// Decoded weights of a panel: two tiles per step, for all steps or as a ring.
struct Decodeds {
    uint16_t* slots;
    int64_t mask;
    uint16_t* at(int64_t step) const { return slots + (step & mask) * 2 * kTileWords; }
};

// Clears the first N of tiles 0 to 3, which hold sums.
template <int N> inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (N == 4) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

// Stores tiles to [N][16][16], one after the other.
template <int N> inline void store_sums(float* to) {
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
    if (N == 4) {
        _tile_stored(2, to + 512, 64);
        _tile_stored(3, to + 768, 64);
    }
}

// sums [T token tiles][2 row tiles][16 rows][16 tokens] = weights times inputs.
template <int T, bool kDecodes, class Rows>
inline void multiply_tiles(const Rows& rows, int64_t begin, int64_t count, const Decodeds& weights, const uint16_t* x,
                           int64_t x_stride, float* sums) {
    constexpr long row = 64;
    const int64_t steps = rows.num_steps(), top = count < kTile ? count : kTile;
    zero_sums<2 * T>();
    if (kDecodes)
        for (int64_t step = 0; step < kAhead && step < steps; step++)
            rows.decode(begin, 0, count, step, weights.at(step));
    for (int64_t step = 0; step < steps; step++) {
        const uint16_t* from = weights.at(step);
        const bool decodes = kDecodes && step + kAhead < steps;
        order_memory();
        _tile_loadd(6, x, row);
        _tile_loadd(4, from, row);
        _tile_dpbf16ps(0, 4, 6);
        if (decodes) rows.decode(begin, 0, top, step + kAhead, weights.at(step + kAhead));
        order_memory();
        _tile_loadd(5, from + kTileWords, row);
        _tile_dpbf16ps(1, 5, 6);
        if (T == 2) {
            _tile_loadd(7, x + x_stride, row);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (decodes) rows.decode(begin, top, count, step + kAhead, weights.at(step + kAhead));
        x += kTileWords;
    }
    store_sums<2 * T>(sums);
}

// Calls sink(tile, sums [2 row tiles][16 rows][16 tokens]) for each tile of tokens.
template <class Rows, class Sink>
inline void multiply_panel(const Rows& rows, int64_t begin, int64_t end, const uint16_t* x, int64_t tiles,
                           const Sink& sink) {
    static thread_local Space<uint16_t> space;
    alignas(64) float sums[2 * kPanel * kTile];
    const int64_t steps = rows.num_steps(), stride = steps * kTileWords;
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    const bool once = tiles <= 2;  // uses a ring of 4 steps, which stays in the L1 cache
    const Decodeds weights{space.take(steps * 2 * kTileWords), once ? 3 : INT64_MAX};
    if (count < kPanel) std::memset(weights.slots, 0, static_cast<size_t>(steps * 2 * kTileWords) * sizeof(uint16_t));
    for (int64_t tile = 0; tile < tiles; tile += 2) {
        const uint16_t* from = x + tile * stride;
        const bool both = tile + 1 < tiles;
        if (tile == 0 && both) multiply_tiles<2, true>(rows, begin, count, weights, from, stride, sums);
        else if (tile == 0) multiply_tiles<1, true>(rows, begin, count, weights, from, stride, sums);
        else if (both) multiply_tiles<2, false>(rows, begin, count, weights, from, stride, sums);
        else multiply_tiles<1, false>(rows, begin, count, weights, from, stride, sums);
        sink(tile, sums);
        if (both) sink(tile + 1, sums + kPanel * kTile);
    }
}

// AVX2: 2 blocks of 32 weights in one step; with AVX-VNNI, products of bytes in one instruction.
#pragma once
#include <immintrin.h>

struct Isa {
    static constexpr int kBlocks = 2, kLanes = 8;
    static constexpr int kOffset4 = 12;
    using Bytes = __m256i;
    using Ints = __m256i;
    using Floats = __m256;

    static Bytes load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
    static Bytes load_unaligned(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static Bytes load_blocks(const void* p, int) {  // the last block of an odd number
        return _mm256_zextsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    }
    static Floats load_floats(const float* p) { return _mm256_load_ps(p); }
    static Floats zero() { return _mm256_setzero_ps(); }

    static void decode4(Bytes packed, Bytes& lo, Bytes& hi) {
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        const __m256i low = _mm256_set1_epi8(15);
        lo = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, low));
        hi = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), low));
    }
#if defined(__AVXVNNI__)
    static constexpr const char* kName = "avx_vnni";
    static constexpr int kOffset8 = 128;
    static Ints dot(Ints sum, Bytes weights, Bytes x) { return _mm256_dpbusd_avx_epi32(sum, weights, x); }
    static Ints dot8(Ints sum, Bytes weights, Bytes x) { return _mm256_dpbusd_avx_epi32(sum, weights, x); }
#else
    static constexpr const char* kName = "avx2";
    static constexpr int kOffset8 = 0;  // with an offset, sums of two products would not fit 16 bits
    static Ints dot(Ints sum, Bytes weights, Bytes x) {
        const __m256i pairs = _mm256_maddubs_epi16(weights, x);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static Ints dot8(Ints sum, Bytes weights, Bytes x) {
        return dot(sum, _mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    }
#endif
    static Floats add_scaled(Floats sum, Ints value, Floats a, Floats b) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(value), _mm256_mul_ps(a, b), sum);
    }
    static Floats scales4(const unsigned char* p) {
        short two;
        __builtin_memcpy(&two, p, 2);
        const __m256i places = _mm256_set_epi32(0x80808001, 0x80808001, 0x80808001, 0x80808001, 0x80808000,
                                                0x80808000, 0x80808000, 0x80808000);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_shuffle_epi8(_mm256_set1_epi16(two), places), 23));
    }
    static Floats scales8(const unsigned short* p) {
        int two;
        __builtin_memcpy(&two, p, 4);
        const __m256i places = _mm256_set_epi32(0x03028080, 0x03028080, 0x03028080, 0x03028080, 0x01008080,
                                                0x01008080, 0x01008080, 0x01008080);
        return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_set1_epi32(two), places));
    }
    static float sum(Floats v) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }

    static void decode_floats(const void* p, Floats* even, Floats* odd) {
        const __m128i packed = _mm_loadu_si128(static_cast<const __m128i*>(p));
        for (int half = 0; half < 2; half++) {
            const __m256i wide = _mm256_cvtepu8_epi32(half == 0 ? packed : _mm_srli_si128(packed, 8));
            even[half] = decoded(wide);
            odd[half] = decoded(_mm256_srli_epi32(wide, 4));
        }
    }
    static Floats decoded(__m256i codes) {  // uses the lowest four bits: three of magnitude, one of sign
        const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(1 << 31));
        return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
    }
};

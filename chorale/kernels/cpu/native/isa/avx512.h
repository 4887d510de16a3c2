// AVX-512 with VNNI: 4 blocks of 32 weights in one step.
#pragma once
#include <immintrin.h>

struct Isa {
#if defined(CHORALE_TILES)
    static constexpr const char* kName = "amx";  // AVX-512, and tiles for many tokens (tiles.h)
#else
    static constexpr const char* kName = "avx512_vnni";
#endif
    static constexpr int kBlocks = 4, kLanes = 16;
    static constexpr int kOffset4 = 12, kOffset8 = 128;  // added to weights: dpbusd's first operand is unsigned
    using Bytes = __m512i;
    using Ints = __m512i;
    using Floats = __m512;

    static Bytes load(const void* p) { return _mm512_load_si512(p); }
    static Bytes load_unaligned(const void* p) { return _mm512_loadu_si512(p); }
    static Bytes load_blocks(const void* p, int blocks) {  // loads the first blocks, then zeros
        return _mm512_maskz_loadu_epi8((1ull << (16 * blocks)) - 1, p);
    }
    static Floats load_floats(const float* p) { return _mm512_load_ps(p); }
    static Floats zero() { return _mm512_setzero_ps(); }

    // Doubled e2m1 values plus kOffset4, from the low and the high halves of bytes.
    static void decode4(Bytes packed, Bytes& lo, Bytes& hi) {
        const __m512i table =
            _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        const __m512i low = _mm512_set1_epi8(15);
        lo = _mm512_shuffle_epi8(table, _mm512_and_si512(packed, low));
        hi = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(packed, 4), low));
    }
    static Ints dot(Ints sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
    static Ints dot8(Ints sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
    static Floats add_scaled(Floats sum, Ints value, Floats a, Floats b) {
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(value), _mm512_mul_ps(a, b), sum);
    }

    // 2^(e - 127) of four exponents, each in four lanes.
    static Floats scales4(const unsigned char* p) {
        int four;
        __builtin_memcpy(&four, p, 4);
        const __m512i places = _mm512_set_epi32(
            0x80808003, 0x80808003, 0x80808003, 0x80808003, 0x80808002, 0x80808002, 0x80808002, 0x80808002,
            0x80808001, 0x80808001, 0x80808001, 0x80808001, 0x80808000, 0x80808000, 0x80808000, 0x80808000);
        const __m512i spread = _mm512_shuffle_epi8(_mm512_set1_epi32(four), places);
        return _mm512_castsi512_ps(_mm512_slli_epi32(spread, 23));
    }
    // Four bfloat16 numbers, each in four lanes.
    static Floats scales8(const unsigned short* p) {
        long long four;
        __builtin_memcpy(&four, p, 8);
        const __m512i places = _mm512_set_epi32(
            0x07068080, 0x07068080, 0x07068080, 0x07068080, 0x05048080, 0x05048080, 0x05048080, 0x05048080,
            0x03028080, 0x03028080, 0x03028080, 0x03028080, 0x01008080, 0x01008080, 0x01008080, 0x01008080);
        return _mm512_castsi512_ps(_mm512_shuffle_epi8(_mm512_set1_epi64(four), places));
    }
    static float sum(Floats v) { return _mm512_reduce_add_ps(v); }

    // 16 bytes of MXFP4 -> the 16 even and the 16 odd weights.
    static void decode_floats(const void* p, Floats* even, Floats* odd) {
        const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                            -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
        even[0] = _mm512_permutexvar_ps(wide, table);  // reads the lowest four bits only
        odd[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table);
    }
};

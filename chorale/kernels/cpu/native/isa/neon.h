// NEON with dot products (ARMv8.2 and later: Apple M1, Graviton 2), or with products of pairs of rows and pairs
// of tokens (i8mm: Apple M2, Graviton 3): one block of 32 weights in one step.
#pragma once
#include <arm_neon.h>

struct Isa {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    static constexpr const char* kName = "neon_i8mm";
#else
    static constexpr const char* kName = "neon_dotprod";
#endif
    static constexpr int kBlocks = 1, kLanes = 4;
    static constexpr int kOffset4 = 0, kOffset8 = 0;  // products of signed bytes
    using Bytes = int8x16_t;
    using Ints = int32x4_t;
    using Floats = float32x4_t;

    static Bytes load(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
    static Bytes load_unaligned(const void* p) { return load(p); }
    static Bytes load_blocks(const void* p, int) { return load(p); }
    static Floats load_floats(const float* p) { return vld1q_f32(p); }
    static Floats zero() { return vdupq_n_f32(0.0f); }

    static void decode4(Bytes packed, Bytes& lo, Bytes& hi) {
        static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        const int8x16_t table = vld1q_s8(values);
        const uint8x16_t bytes = vreinterpretq_u8_s8(packed);
        lo = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15)));
        hi = vqtbl1q_s8(table, vshrq_n_u8(bytes, 4));
    }
    static Ints dot(Ints sum, Bytes weights, Bytes x) { return vdotq_s32(sum, weights, x); }
    static Ints dot8(Ints sum, Bytes weights, Bytes x) { return vdotq_s32(sum, weights, x); }
    static Floats add_scaled(Floats sum, Ints value, Floats a, Floats b) {
        return vfmaq_f32(sum, vcvtq_f32_s32(value), vmulq_f32(a, b));
    }
    static Floats scales4(const unsigned char* p) {
        return vreinterpretq_f32_u32(vdupq_n_u32(static_cast<uint32_t>(*p) << 23));
    }
    static Floats scales8(const unsigned short* p) {
        return vreinterpretq_f32_u32(vdupq_n_u32(static_cast<uint32_t>(*p) << 16));
    }
    static float sum(Floats v) { return vaddvq_f32(v); }

#if defined(__ARM_FEATURE_MATMUL_INT8)
    // Two rows of one block, and their scales. Halves of rows alternate, as vmmlaq requires.
    struct Pair {
        Bytes halves[4];
        Floats scales;
    };
    static void halves(Bytes a, Bytes b, Bytes* out) {
        const int64x2_t first = vreinterpretq_s64_s8(a), second = vreinterpretq_s64_s8(b);
        out[0] = vreinterpretq_s8_s64(vzip1q_s64(first, second));
        out[1] = vreinterpretq_s8_s64(vzip2q_s64(first, second));
    }
    // Scales of two rows of weights, as a a b b.
    static Pair rows(Bytes lo_a, Bytes hi_a, Floats a, Bytes lo_b, Bytes hi_b, Floats b) {
        Pair made;
        halves(lo_a, lo_b, made.halves);
        halves(hi_a, hi_b, made.halves + 2);
        made.scales = vcombine_f32(vget_low_f32(a), vget_low_f32(b));
        return made;
    }
    // Scales of two inputs, as a b a b.
    static Pair inputs(const signed char* lo_a, const signed char* hi_a, const float* a, const signed char* lo_b,
                       const signed char* hi_b, const float* b) {
        Pair made;
        halves(load(lo_a), load(lo_b), made.halves);
        halves(load(hi_a), load(hi_b), made.halves + 2);
        made.scales = vzip1q_f32(vdupq_n_f32(*a), vdupq_n_f32(*b));
        return made;
    }
    // [row a, token a], [row a, token b], [row b, token a], [row b, token b]
    static Floats add_pairs(Floats sum, const Pair& weights, const Pair& x) {
        Ints value = vdupq_n_s32(0);
        for (int i = 0; i < 4; i++) value = vmmlaq_s32(value, weights.halves[i], x.halves[i]);
        return add_scaled(sum, value, weights.scales, x.scales);
    }
    static void store(float* p, Floats v) { vst1q_f32(p, v); }
#endif

    static void decode_floats(const void* p, Floats* even, Floats* odd) {
        int8x16_t lo, hi;
        decode4(load(p), lo, hi);
        widen(lo, even);
        widen(hi, odd);
    }
    static void widen(int8x16_t doubled, Floats* out) {
        const int16x8_t half[2] = {vmovl_s8(vget_low_s8(doubled)), vmovl_s8(vget_high_s8(doubled))};
        for (int i = 0; i < 2; i++) {
            out[2 * i] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(half[i]))), 0.5f);
            out[2 * i + 1] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(half[i]))), 0.5f);
        }
    }
};

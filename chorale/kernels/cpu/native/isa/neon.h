// NEON with dot products (ARMv8.2 and later: Apple M1, Graviton 2): one block of 32 weights in one step.
#pragma once
#include <arm_neon.h>

struct Isa {
    static constexpr const char* kName = "neon_dotprod";
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

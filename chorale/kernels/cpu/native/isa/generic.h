// Any processor: the same steps on arrays, which compilers translate to baseline instructions.
#pragma once
#include <cstring>

struct Isa {
    static constexpr const char* kName = "generic";
    static constexpr int kBlocks = 1, kLanes = 4;
    static constexpr int kOffset4 = 0, kOffset8 = 0;
    struct Bytes {
        signed char at[16];
    };
    typedef int Ints __attribute__((vector_size(16)));
    typedef float Floats __attribute__((vector_size(16)));

    static Bytes load(const void* p) {
        Bytes found;
        std::memcpy(&found, p, 16);
        return found;
    }
    static Bytes load_unaligned(const void* p) { return load(p); }
    static Bytes load_blocks(const void* p, int) { return load(p); }
    static Floats load_floats(const float* p) {
        Floats found;
        std::memcpy(&found, p, 16);
        return found;
    }
    static Floats zero() { return Floats{}; }
    static signed char value(int code) {
        static const signed char values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        return values[code & 15];
    }
    static void decode4(Bytes packed, Bytes& lo, Bytes& hi) {
        for (int i = 0; i < 16; i++) {
            const int byte = static_cast<unsigned char>(packed.at[i]);
            lo.at[i] = value(byte);
            hi.at[i] = value(byte >> 4);
        }
    }
    static Ints dot(Ints sum, Bytes weights, Bytes x) {
        for (int i = 0; i < 16; i++) sum[i / 4] += weights.at[i] * x.at[i];
        return sum;
    }
    static Ints dot8(Ints sum, Bytes weights, Bytes x) { return dot(sum, weights, x); }
    static Floats add_scaled(Floats sum, Ints value, Floats a, Floats b) {
        return sum + __builtin_convertvector(value, Floats) * (a * b);
    }
    static Floats scales4(const unsigned char* p) { return splat(static_cast<unsigned>(*p) << 23); }
    static Floats scales8(const unsigned short* p) { return splat(static_cast<unsigned>(*p) << 16); }
    static Floats splat(unsigned bits) {
        float one;
        std::memcpy(&one, &bits, 4);
        return Floats{one, one, one, one};
    }
    static float sum(Floats v) { return (v[0] + v[2]) + (v[1] + v[3]); }

    static void decode_floats(const void* p, Floats* even, Floats* odd) {
        const unsigned char* bytes = static_cast<const unsigned char*>(p);
        for (int i = 0; i < 16; i++) {
            even[i / 4][i % 4] = 0.5f * value(bytes[i]);
            odd[i / 4][i % 4] = 0.5f * value(bytes[i] >> 4);
        }
    }
};

// Vectors of floats of the instruction set that this file is compiled for.
#pragma once
#include <cmath>
#include <cstring>

constexpr int kLanes = Isa::kLanes;
typedef float Floats __attribute__((vector_size(4 * kLanes), may_alias));
typedef int Ints __attribute__((vector_size(4 * kLanes), may_alias));
typedef unsigned short Shorts __attribute__((vector_size(2 * kLanes), may_alias));

inline Floats load(const float* p) {
    Floats found;
    std::memcpy(&found, p, sizeof found);
    return found;
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline Floats splat(float v) { return Floats{} + v; }
inline Floats load(const uint16_t* p) {  // bfloat16
    Shorts found;
    std::memcpy(&found, p, sizeof found);
    return reinterpret_cast<Floats>(__builtin_convertvector(found, Ints) << 16);
}
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define CHORALE_SHUFFLES
#endif
#endif
#if defined(CHORALE_SHUFFLES)
template <int Width, size_t... At> inline Floats turned(Floats v, std::index_sequence<At...>) {
    return __builtin_shufflevector(v, v, (static_cast<int>(At) + Width) % kLanes...);
}
template <int Width> inline Floats halved(Floats v) {
    v += turned<Width>(v, std::make_index_sequence<kLanes>{});
    if constexpr (Width > 1) return halved<Width / 2>(v);
    return v;
}
inline float sum(Floats v) { return halved<kLanes / 2>(v)[0]; }  // in registers: short rows need many sums
#else
inline float sum(Floats v) {
    float at[kLanes];
    store(at, v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) at[i] += at[i + width];
    return at[0];
}
#endif
inline float largest(Floats v) {
    float at[kLanes], found;
    store(at, v);
    found = at[0];
    for (int i = 1; i < kLanes; i++) found = at[i] > found ? at[i] : found;
    return found;
}
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }

inline float to_float(float v) { return v; }
inline float to_float(uint16_t v) {
    const uint32_t bits = static_cast<uint32_t>(v) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}
inline uint16_t to_bfloat16(float v) {  // rounds to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// e^v, within 2 units in the last place; 0 below -87, infinite above 88.7, NaN for NaN.
inline Floats exp(Floats v) {
    const Floats scaled = v * 1.44269504088896341f;
    const Floats kept = select((Ints)(scaled > -126.0f) & (Ints)(scaled < 128.0f), scaled, splat(0.0f));
    const Floats shifted = kept + 12582912.0f;  // 1.5 * 2^23: the integer is in the lowest bits
    const Floats whole = shifted - 12582912.0f;
    const Floats at = select((Ints)(scaled > -126.0f) & (Ints)(scaled < 128.0f), v, splat(0.0f));
    const Floats rest = (at - whole * 0.693359375f) - whole * -2.12194440e-4f;
    Floats sum = splat(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    const Ints halved = (__builtin_convertvector(whole, Ints) + 126) << 23;  // 2^128 is not a float
    const Floats found = select((Ints)(whole > 127.0f), sum * reinterpret_cast<Floats>(halved) * 2.0f,
                                sum * reinterpret_cast<Floats>(power));
    const Floats outside = select((Ints)(scaled >= 128.0f), splat(INFINITY), splat(0.0f));
    const Floats inside = select((Ints)(scaled > -126.0f) & (Ints)(scaled < 128.0f), found, outside);
    return select((Ints)(v == v), inside, v);
}

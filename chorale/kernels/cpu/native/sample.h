// One token a row: temperature, masks and Gumbel noise, as kernels/reference/{sampling,noise}.py define them.
#pragma once

// log v for v > 0 and normal, within 2 units of the last place.
inline Floats log(Floats v) {
    Ints bits = reinterpret_cast<Ints>(v);
    const Ints shifted = bits - 0x3F3504F3;  // of sqrt(1/2)
    const Ints power = shifted >> 23;
    bits = (shifted & 0x007FFFFF) + 0x3F3504F3;
    const Floats x = reinterpret_cast<Floats>(bits) - 1.0f, e = __builtin_convertvector(power, Floats);
    Floats sum = splat(7.0376836292e-2f);
    sum = sum * x - 1.1514610310e-1f;
    sum = sum * x + 1.1676998740e-1f;
    sum = sum * x - 1.2420140846e-1f;
    sum = sum * x + 1.4249322787e-1f;
    sum = sum * x - 1.6668057665e-1f;
    sum = sum * x + 2.0000714765e-1f;
    sum = sum * x - 2.4999993993e-1f;
    sum = sum * x + 3.3333331174e-1f;
    const Floats square = x * x;
    const Floats low = sum * x * square + e * -2.12194440e-4f - 0.5f * square;
    return (x + low) + e * 0.693359375f;
}

// -log(1 - v) for 2^-32 <= v < 1.
inline Floats minus_log1p(Floats v) {
    const Floats u = 1.0f - v, change = u - 1.0f;
    return select((Ints)(u == 1.0f), v, log(u) * v / select((Ints)(u == 1.0f), splat(1.0f), change));
}

typedef unsigned Words __attribute__((vector_size(4 * kLanes), may_alias));

inline Floats gumbel(Words x, uint32_t a, uint32_t b) {  // x: token ids
    x = x * 0x9E3779B9u + a;
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= b;
    x ^= x >> 15;
    x *= 0x735A2D97u;
    x ^= x >> 15;
    const Floats wide = __builtin_convertvector(reinterpret_cast<Ints>(x >> 1), Floats);
    const Floats v = wide * 0x1p-31f + 0x1p-32f, most = splat(1.0f - 0x1p-24f);
    return -log(minus_log1p(v < most ? v : most));
}

struct Best {
    float score = -INFINITY, most = -INFINITY;  // most: of the raw logits
    int64_t token = 0;
    bool is_bad = false;  // some raw logit is NaN or +inf
};

struct Draw {
    const float* logits;               // of the row
    const unsigned char* forbidden;    // [V]
    const unsigned char* allowed;      // [V / 8] bits, lowest first; null: all
    const int32_t* early_stops;        // kEarlyStops ids, or null
    float temperature;
    uint32_t a, b;
};

constexpr int kEarlyStops = 8;
constexpr int64_t kColumns = 8192;  // of one task

template <bool kHeat> Best best_of(const Draw& draw, int64_t begin, int64_t end) {
    alignas(64) float scores[kColumns];
    const int64_t count = end - begin, padded = (count + kLanes - 1) / kLanes * kLanes;
    std::memcpy(scores, draw.logits + begin, static_cast<size_t>(count) * sizeof(float));
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    Best best;
    Floats most = splat(-INFINITY);
    Ints bad = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
        const Floats v = load(scores + i);
        most = max(v, most);
        bad |= ~(Ints)(v < INFINITY);
    }
    for (int i = 0; i < kLanes; i++) best.is_bad = best.is_bad || bad[i] != 0;
    best.most = largest(most);
    for (int64_t i = 0; i < count; i++)
        if (draw.forbidden[begin + i] != 0) scores[i] = -INFINITY;
    if (draw.allowed != nullptr)
        for (int64_t i = 0; i < count; i++)
            if ((draw.allowed[(begin + i) / 8] >> ((begin + i) % 8) & 1) == 0) scores[i] = -INFINITY;
    if (draw.early_stops != nullptr)
        for (int i = 0; i < kEarlyStops; i++)
            if (draw.early_stops[i] >= begin && draw.early_stops[i] < end) scores[draw.early_stops[i] - begin] = -INFINITY;
    Floats top = splat(-INFINITY);
    Words ids, place = {};
    for (int i = 0; i < kLanes; i++) ids[i] = static_cast<uint32_t>(begin + i);
    for (int64_t i = 0; i < padded; i += kLanes, ids += kLanes) {
        Floats score = load(scores + i);
        if (kHeat) score = score / draw.temperature + gumbel(ids, draw.a, draw.b);
        const Ints is_better = (Ints)(score > top);
        top = select(is_better, score, top);
        place = is_better ? ids : place;
    }
    for (int i = 0; i < kLanes; i++)
        if (top[i] > best.score || (top[i] == best.score && top[i] > -INFINITY && place[i] < best.token)) {
            best.score = top[i];
            best.token = place[i];
        }
    return best;
}

void sample(const Sampling* given, int64_t* out) {
    const int64_t tasks = (given->columns + kColumns - 1) / kColumns;
    static thread_local Space<Best> space;
    Best* found = space.take(given->rows * tasks);
    chorale::parallel(given->rows * tasks, [=](long task) {
        const int64_t row = task / tasks, begin = task % tasks * kColumns;
        const int64_t end = begin + kColumns < given->columns ? begin + kColumns : given->columns;
        const bool has_grammar = given->allowed_index != nullptr && given->allowed_index[row] >= 0;
        const bool has_stops = given->early_stops != nullptr && given->early_stops[row * given->stops_stride] >= 0;
        const Draw draw{given->logits + row * given->columns,
                        given->forbidden,
                        has_grammar ? given->allowed + given->allowed_index[row] * given->allowed_stride : nullptr,
                        has_stops ? given->early_stops + row * given->stops_stride : nullptr,
                        given->temperature[row],
                        static_cast<uint32_t>(given->keys[2 * row]),
                        static_cast<uint32_t>(given->keys[2 * row + 1])};
        found[task] = draw.temperature > 0.0f ? best_of<true>(draw, begin, end) : best_of<false>(draw, begin, end);
    });
    for (int64_t row = 0; row < given->rows; row++) {
        Best best;
        for (int64_t i = 0; i < tasks; i++) {
            const Best& part = found[row * tasks + i];
            best.is_bad = best.is_bad || part.is_bad;
            best.most = part.most > best.most ? part.most : best.most;
            if (part.score > best.score) {
                best.score = part.score;
                best.token = part.token;
            }
        }
        const bool is_finite = !best.is_bad && best.most > -INFINITY;
        out[row] = !is_finite ? -1 : best.score == -INFINITY ? -2 : best.token;  // the reasons of kernels/ops.py
    }
}

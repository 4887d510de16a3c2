// Samples one token per row: temperature, masks and Gumbel noise as in kernels/reference/sampling.
#pragma once

// log v for normal v > 0, within 2 units in the last place.
inline Floats log(Floats v) {
    Ints bits = reinterpret_cast<Ints>(v);
    const Ints shifted = bits - 0x3F3504F3;  // bits of sqrt(1/2)
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
    float score = -INFINITY, most = -INFINITY;  // most: maximum of the raw logits
    int64_t token = 0;
    bool is_bad = false;  // some raw logit is NaN or +inf
};

struct Draw {
    const float* logits;               // the row's logits
    const unsigned char* forbidden;    // [V]
    const unsigned char* allowed;      // [V / 8] bits, lowest first; null: all
    const int32_t* early_stops;        // kEarlyStops ids, or null
    float temperature;
    uint32_t a, b;
};

constexpr int kEarlyStops = 8;
constexpr int64_t kColumns = 8192;  // columns per task

// Copies the logits of [begin, end) to ``scores``, divided by the temperature, with -inf for tokens that the
// row may not have. Pads with -inf to whole vectors.
inline Best prepare(const Draw& draw, int64_t begin, int64_t end, float* scores) {
    const int64_t count = end - begin, padded = (count + kLanes - 1) / kLanes * kLanes;
    std::memcpy(scores, draw.logits + begin, static_cast<size_t>(count) * sizeof(float));
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    Best best;
    Floats most = splat(-INFINITY);
    Ints bad = {};
    const float temperature = draw.temperature > 0.0f ? draw.temperature : 1.0f;
    for (int64_t i = 0; i < padded; i += kLanes) {
        const Floats v = load(scores + i);
        most = max(v, most);
        bad |= ~(Ints)(v < INFINITY);
        store(scores + i, v / temperature);
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
    return best;
}

// Finds the largest of the ``scores`` of [begin, end) that reach ``threshold``, with noise if there is a temperature.
template <bool kHeat>
void find_best(const Draw& draw, const float* scores, int64_t begin, int64_t end, float threshold, Best& best) {
    Floats top = splat(-INFINITY);
    Words ids, place = {};
    for (int i = 0; i < kLanes; i++) ids[i] = static_cast<uint32_t>(begin + i);
    for (int64_t i = 0; i < end - begin; i += kLanes, ids += kLanes) {
        const Floats kept = load(scores + i);
        Floats score = select((Ints)(kept >= threshold), kept, splat(-INFINITY));
        if (kHeat) score = score + gumbel(ids, draw.a, draw.b);
        const Ints is_better = (Ints)(score > top);
        top = select(is_better, score, top);
        place = is_better ? ids : place;
    }
    for (int i = 0; i < kLanes; i++)
        if (top[i] > best.score || (top[i] == best.score && top[i] > -INFINITY && place[i] < best.token)) {
            best.score = top[i];
            best.token = place[i];
        }
}

inline void add(Best& best, const Best& part) {  // part: from higher ids
    best.is_bad = best.is_bad || part.is_bad;
    best.most = part.most > best.most ? part.most : best.most;
    if (part.score > best.score) {
        best.score = part.score;
        best.token = part.token;
    }
}

template <class Act> void each_part(int64_t columns, Best* parts, const Act& act) {
    chorale::parallel((columns + kColumns - 1) / kColumns, [=, &act](long part) {
        const int64_t begin = part * kColumns;
        act(begin, begin + kColumns < columns ? begin + kColumns : columns, parts[part]);
    });
}

// Fills ``parts`` of a row with filters.
inline void filter(const Draw& draw, const Filters& filters, int64_t columns, Best* parts) {
    static thread_local Space<float> space;
    float* scores = space.take(columns + kLanes);
    each_part(columns, parts, [&](int64_t begin, int64_t end, Best& part) {
        part = prepare(draw, begin, end, scores + begin);
        for (int64_t i = begin; i < end; i++) part.score = scores[i] > part.score ? scores[i] : part.score;
    });
    Best whole;
    for (int64_t part = 0; part * kColumns < columns; part++) {
        add(whole, parts[part]);
        parts[part].score = -INFINITY;
    }
    if (whole.is_bad) return;
    const float threshold = Scores{scores, columns, whole.score}.threshold(filters);
    each_part(columns, parts, [&](int64_t begin, int64_t end, Best& part) {
        find_best<true>(draw, scores + begin, begin, end, threshold, part);
    });
}

inline Best part_of(const Draw& draw, int64_t begin, int64_t end) {
    alignas(64) float scores[kColumns];
    Best best = prepare(draw, begin, end, scores);
    if (draw.temperature > 0.0f) find_best<true>(draw, scores, begin, end, -INFINITY, best);
    else find_best<false>(draw, scores, begin, end, -INFINITY, best);
    return best;
}

inline Draw draw_of(const Sampling& given, int64_t row) {
    const bool has_grammar = given.allowed_index != nullptr && given.allowed_index[row] >= 0;
    const bool has_stops = given.early_stops != nullptr && given.early_stops[row * given.stops_stride] >= 0;
    return {given.logits + row * given.columns,
            given.forbidden,
            has_grammar ? given.allowed + given.allowed_index[row] * given.allowed_stride : nullptr,
            has_stops ? given.early_stops + row * given.stops_stride : nullptr,
            given.temperature[row],
            static_cast<uint32_t>(given.keys[2 * row]),
            static_cast<uint32_t>(given.keys[2 * row + 1])};
}

void sample(const Sampling* given, int64_t* out) {
    const int64_t columns = given->columns, tasks = (columns + kColumns - 1) / kColumns;
    static thread_local Space<Best> space;
    Best* found = space.take(given->rows * tasks);
    const auto filters_of = [=](int64_t row) {
        const float* at = given->filters + 3 * row;
        return given->filters == nullptr || given->temperature[row] <= 0.0f ? Filters{INFINITY, 1.0f, 0.0f} : Filters{at[0], at[1], at[2]};
    };
    chorale::parallel(given->rows * tasks, [=](long task) {
        const int64_t row = task / tasks, begin = task % tasks * kColumns;
        if (filters_of(row).is_used(columns)) return;
        found[task] = part_of(draw_of(*given, row), begin, begin + kColumns < columns ? begin + kColumns : columns);
    });
    for (int64_t row = 0; row < given->rows; row++) {
        if (filters_of(row).is_used(columns)) filter(draw_of(*given, row), filters_of(row), columns, found + row * tasks);
        Best best;
        for (int64_t i = 0; i < tasks; i++) add(best, found[row * tasks + i]);
        const bool is_finite = !best.is_bad && best.most > -INFINITY;
        out[row] = !is_finite ? -1 : best.score == -INFINITY ? -2 : best.token;  // the codes in kernels/ops.py
    }
}

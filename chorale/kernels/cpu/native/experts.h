// The expert layer: x += sum over the chosen experts of gate * expert(normed), in the order of expert ids.
#pragma once

struct Chosen {  // the tokens of one expert
    int64_t expert, begin, count;  // begin: index among all pairs, sorted by expert and then by token
};

struct Pairs {
    std::vector<Chosen> chosen;
    std::vector<int64_t> tokens;  // token of each pair
    std::vector<float> gates;

    int64_t most() const {  // maximum number of tokens per expert
        int64_t found = 0;
        for (const Chosen& one : chosen) found = one.count > found ? one.count : found;
        return found;
    }

    void sort(const int64_t* ids, const float* given, int64_t num_tokens, int64_t top_k, int64_t num_experts) {
        std::vector<int64_t> begins(static_cast<size_t>(num_experts) + 1, 0);
        for (int64_t i = 0; i < num_tokens * top_k; i++)
            if (ids[i] >= 0 && ids[i] < num_experts) begins[static_cast<size_t>(ids[i]) + 1]++;
        chosen.clear();
        for (int64_t expert = 0; expert < num_experts; expert++) {
            const auto at = static_cast<size_t>(expert);
            if (begins[at + 1] > 0) chosen.push_back({expert, begins[at], begins[at + 1]});
            begins[at + 1] += begins[at];
        }
        tokens.resize(static_cast<size_t>(begins.back()));
        gates.resize(tokens.size());
        for (int64_t i = 0; i < num_tokens * top_k; i++) {
            if (ids[i] < 0 || ids[i] >= num_experts) continue;  // not an expert
            const auto place = static_cast<size_t>(begins[static_cast<size_t>(ids[i])]++);
            tokens[place] = i / top_k;
            gates[place] = given[i];
        }
    }
};

inline float swiglu(float gate, float up, float limit, float alpha) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + std::exp(-alpha * gate)) * (up + 1.0f);
}

template <class Rows>
void up_rows(const Experts& experts, const Pairs& pairs, const typename Rows::Input* x, float* inner) {
    const Matrix& matrix = experts.gate_up;
    const auto* bias = static_cast<const float*>(matrix.bias);
    const auto experts_chosen = static_cast<int64_t>(pairs.chosen.size());
    const int64_t at_once = rows_of_task(bytes_of_row(matrix), matrix.rows * experts_chosen, pairs.most());
    const int64_t tasks = (matrix.rows + at_once - 1) / at_once;
    const int64_t width = matrix.rows / 2;
    chorale::parallel(experts_chosen * tasks, [&](long task) {
        const Chosen& one = pairs.chosen[static_cast<size_t>(task / tasks)];
        const int64_t begin = task % tasks * at_once, end = begin + at_once < matrix.rows ? begin + at_once : matrix.rows;
        static thread_local Space<float> space;  // [tokens, rows of this task]
        float* results = space.take(one.count * at_once);
        multiply_all(Rows(matrix, one.expert * matrix.rows), begin, end, x + one.begin, one.count,
                     [&](int64_t row, int64_t place, float value) {
                         results[place * at_once + row - begin] = value + bias[one.expert * matrix.rows + row];
                     });
        for (int64_t place = 0; place < one.count; place++)
            for (int64_t row = begin; row < end; row += 2) {
                const float* both = results + place * at_once + row - begin;
                inner[(one.begin + place) * width + row / 2] = swiglu(both[0], both[1], experts.limit, experts.alpha);
            }
    });
}

// Columns [begin, end) of every expert's rows; the first columns have the bias.
inline Matrix part_of(const Matrix& matrix, int64_t begin, int64_t end) {
    Matrix part = matrix;
    const int64_t bytes = matrix.element == kMxfp4 ? begin / 2 : begin * (matrix.element == kBfloat16 ? 2 : 4);
    part.data = static_cast<const unsigned char*>(matrix.data) + bytes;
    if (matrix.scales != nullptr) part.scales = static_cast<const unsigned char*>(matrix.scales) + begin / kGroup;
    if (begin > 0) part.bias = nullptr;
    part.columns = end - begin;
    part.stride = static_cast<int32_t>(stride_of(matrix));
    return part;
}

template <class Rows>
void down_rows(const Matrix& matrix, const Pairs& pairs, const typename Rows::Input* x, float* out) {
    const auto* bias = static_cast<const float*>(matrix.bias);
    const int64_t at_once = rows_of_task(bytes_of_row(matrix), matrix.rows, pairs.most());
    chorale::parallel((matrix.rows + at_once - 1) / at_once, [&](long task) {
        const int64_t begin = task * at_once, end = begin + at_once < matrix.rows ? begin + at_once : matrix.rows;
        for (const Chosen& one : pairs.chosen)
            multiply_all(Rows(matrix, one.expert * matrix.rows), begin, end, x + one.begin, one.count,
                         [&](int64_t row, int64_t place, float value) {
                             const auto pair = static_cast<size_t>(one.begin + place);
                             if (bias != nullptr) value += bias[one.expert * matrix.rows + row];
                             out[pairs.tokens[pair] * matrix.rows + row] += pairs.gates[pair] * value;
                         });
    });
}

// Calls ``act(x)`` with the inputs of ``places`` in the format that ``Rows`` reads.
template <class Rows, class Act> void with_inputs(const Inputs& inputs, int64_t count, const int64_t* places, const Act& act) {
    static thread_local Space<typename Rows::Input> space;
    typename Rows::Input* x = space.take(count);
    for (int64_t i = 0; i < count; i++) get(inputs, places == nullptr ? i : places[i], x[i]);
    act(x);
}

template <class Up, class Down>
void run_experts(const float* normed, int64_t tokens, int64_t hidden, const Experts& experts, const Pairs& pairs,
                 float* x) {
    static thread_local Inputs first, second;
    static thread_local Space<float> space;
    const auto num_pairs = static_cast<int64_t>(pairs.tokens.size());
    const int64_t width = experts.down.columns;
    float* inner = space.take(num_pairs * width);
    const bool by_token = num_pairs >= tokens;
    const int64_t* places = pairs.tokens.data();
    first.fill(by_token ? tokens : num_pairs, experts.gate_up,
               [&](int64_t at) { return normed + (by_token ? at : places[at]) * hidden; });
    with_inputs<Up>(first, num_pairs, by_token ? places : nullptr,
                    [&](const typename Up::Input* inputs) { up_rows<Up>(experts, pairs, inputs, inner); });
    const int64_t whole = width, *ends = experts.num_parts > 0 ? experts.ends : &whole;
    for (int64_t part = 0, begin = 0; begin < width; begin = ends[part++]) {
        const Matrix down = part_of(experts.down, begin, ends[part]);
        second.fill(num_pairs, down, [&](int64_t pair) { return inner + pair * width + begin; });
        float* out = x + part * tokens * hidden;
        with_inputs<Down>(second, num_pairs, nullptr,
                          [&](const typename Down::Input* inputs) { down_rows<Down>(down, pairs, inputs, out); });
    }
}

#if defined(CHORALE_TILES)
#include "tile_experts.h"
#endif

void moe(const float* normed, int64_t tokens, int64_t hidden, const int64_t* ids, const float* gates, int64_t top_k,
         const Experts* experts, float* x) {
    static thread_local Pairs pairs;
    pairs.sort(ids, gates, tokens, top_k, experts->num_experts);
    if (pairs.tokens.empty()) return;
    const Matrix& matrix = experts->gate_up;
    if (matrix.element == kMxfp4 && matrix.exact) run_experts<Mxfp4ExactRows, Mxfp4ExactRows>(normed, tokens, hidden, *experts, pairs, x);
#if defined(CHORALE_TILES)
    else if (matrix.element == kMxfp4 && !matrix.fixed) run_some_on_tiles(normed, tokens, hidden, *experts, pairs, x);
#endif
    else if (matrix.element == kMxfp4) run_experts<Mxfp4Rows, Mxfp4Rows>(normed, tokens, hidden, *experts, pairs, x);
    else if (matrix.element == kBfloat16) run_experts<DenseRows<uint16_t>, DenseRows<uint16_t>>(normed, tokens, hidden, *experts, pairs, x);
    else run_experts<DenseRows<float>, DenseRows<float>>(normed, tokens, hidden, *experts, pairs, x);
}

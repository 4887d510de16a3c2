// The CPU kernels against plain loops in double precision: built with sanitizers, or for another processor, by
// test_native.py. Arrays end at the last byte that a kernel may read, and begin at odd addresses.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "pool.h"
#include "table.h"

using namespace chorale;
extern "C" const Table* chorale_cpu_table(const char* name);
extern "C" void chorale_cpu_threads(int count, const int* cpus);

static std::mt19937 rng(7);
static int failures = 0;
static const Table* table;

static void check(bool ok, const char* what, double found, double bound) {
    if (ok) return;
    failures++;
    std::printf("%s: %s: %g, allowed %g\n", table->name, what, found, bound);
}

// Exactly ``count`` elements, so that a sanitizer sees an access behind them; ``shift`` bytes from alignment.
template <class T> struct Exact {
    std::unique_ptr<char[]> memory;
    T* data;
    size_t count;
    explicit Exact(size_t n, size_t shift = 0) : memory(new char[n * sizeof(T) + shift]), data(reinterpret_cast<T*>(memory.get() + shift)), count(n) {}
    T& operator[](size_t i) { return data[i]; }
};

static float normal() { return std::normal_distribution<float>()(rng); }
static uint16_t bfloat16(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return static_cast<uint16_t>(bits >> 16);
}
static float widened(uint16_t v) {
    const uint32_t bits = static_cast<uint32_t>(v) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}
static const double kValues[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};

static double distance(const float* found, const std::vector<double>& expected) {
    double wrong = 0, size = 0;
    for (size_t i = 0; i < expected.size(); i++) {
        wrong += (found[i] - expected[i]) * (found[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    return std::sqrt(wrong / (size > 0 ? size : 1));
}

// Of the products of rounded inputs. Tiles have inputs of 8 significant bits, so most of a dense product's error is the
// weights'; a wrong scale of one block in 90 would be an error of 0.1.
static double bound(int64_t tokens, double usual, double of_tiles) {
    return std::strcmp(table->name, "amx") == 0 && tokens >= 40 ? of_tiles : usual;
}

static void linear(int64_t tokens, int64_t rows, int64_t columns, bool normed, size_t shift) {
    Exact<float> x(tokens * columns), bias(rows), norm(columns), out(tokens * rows);
    Exact<uint16_t> weight(rows * columns, shift);
    for (size_t i = 0; i < x.count; i++) x[i] = normal();
    for (size_t i = 0; i < norm.count; i++) norm[i] = 1 + normal() / 4;
    for (size_t i = 0; i < weight.count; i++) weight[i] = bfloat16(normal());
    for (size_t i = 0; i < bias.count; i++) bias[i] = normal();
    std::vector<double> expected(tokens * rows);
    for (int64_t t = 0; t < tokens; t++) {
        double square = 0;
        for (int64_t k = 0; k < columns; k++) square += double(x[t * columns + k]) * x[t * columns + k];
        const double factor = normed ? 1 / std::sqrt(square / columns + 1e-5) : 1;
        for (int64_t n = 0; n < rows; n++) {
            double sum = bias[n];
            for (int64_t k = 0; k < columns; k++)
                sum += x[t * columns + k] * factor * (normed ? norm[k] : 1) * widened(weight[n * columns + k]);
            expected[t * rows + n] = sum;
        }
    }
    const Matrix exact{weight.data, nullptr, bias.data, rows, columns, kBfloat16, 1};
    table->linear(x.data, tokens, normed ? norm.data : nullptr, 1e-5f, &exact, out.data, 0);
    check(distance(out.data, expected) < 1e-5, "exact product", distance(out.data, expected), 1e-5);
    Exact<unsigned char> packed(rows * table->packed_bytes(columns));
    table->pack(weight.data, kBfloat16, rows, columns, packed.data);
    const Matrix rounded{packed.data, nullptr, bias.data, rows, columns, kInt8, 0};
    table->linear(x.data, tokens, normed ? norm.data : nullptr, 1e-5f, &rounded, out.data, 0);
    const double most = bound(tokens, 0.015, 0.008), found = distance(out.data, expected);
    check(found < most, "rounded product", found, most);
    Exact<float> alone(rows);
    for (int64_t t = 0; t < tokens && tokens < 8; t++) {
        table->linear(x.data + t * columns, 1, normed ? norm.data : nullptr, 1e-5f, &rounded, alone.data, 0);
        const bool is_same = std::memcmp(alone.data, out.data + t * rows, static_cast<size_t>(rows) * sizeof(float)) == 0;
        check(is_same, "a token alone and beside others", double(t), double(tokens));
    }
}

static void moe(int64_t tokens, int64_t hidden, int64_t inter, int64_t experts, int64_t top_k) {
    Exact<unsigned char> up(experts * 2 * inter * hidden / 2, 1), up_scales(experts * 2 * inter * hidden / 32, 3);
    Exact<unsigned char> down(experts * hidden * inter / 2, 5), down_scales(experts * hidden * inter / 32, 1);
    for (Exact<unsigned char>* each : {&up, &down})
        for (size_t i = 0; i < each->count; i++) (*each)[i] = static_cast<unsigned char>(rng());
    for (Exact<unsigned char>* each : {&up_scales, &down_scales})
        for (size_t i = 0; i < each->count; i++) (*each)[i] = static_cast<unsigned char>(118 + rng() % 6);
    Exact<float> up_bias(experts * 2 * inter), down_bias(experts * hidden), x(tokens * hidden), normed(tokens * hidden);
    for (Exact<float>* each : {&up_bias, &down_bias, &x, &normed})
        for (size_t i = 0; i < each->count; i++) (*each)[i] = normal();
    Exact<int64_t> ids(tokens * top_k);
    Exact<float> gates(tokens * top_k);
    for (size_t i = 0; i < ids.count; i++) ids[i] = static_cast<int64_t>((i / top_k * 3 + i % top_k * 2) % (experts + 1));
    for (size_t i = 0; i < gates.count; i++) gates[i] = 0.3f;
    auto weight = [](Exact<unsigned char>& blocks, Exact<unsigned char>& scales, size_t row, int64_t columns, int64_t k) {
        const size_t place = row * columns + k;
        const int code = blocks[place / 2] >> (place % 2 * 4) & 15;
        return kValues[code] * std::exp2(scales[place / 32] - 127.0);
    };
    std::vector<double> expected(x.data, x.data + x.count);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t k = 0; k < top_k; k++) {
            const int64_t e = ids[t * top_k + k];
            if (e >= experts) continue;
            std::vector<double> inner(inter);
            for (int64_t i = 0; i < inter; i++) {
                double both[2];
                for (int64_t j = 0; j < 2; j++) {
                    const size_t row = (e * inter + i) * 2 + j;
                    both[j] = up_bias[row];
                    for (int64_t h = 0; h < hidden; h++) both[j] += normed[t * hidden + h] * weight(up, up_scales, row, hidden, h);
                }
                const double gate = std::fmin(both[0], 7), rise = std::fmax(std::fmin(both[1], 7), -7);
                inner[i] = gate / (1 + std::exp(-1.702 * gate)) * (rise + 1);
            }
            for (int64_t h = 0; h < hidden; h++) {
                double sum = down_bias[e * hidden + h];
                for (int64_t i = 0; i < inter; i++) sum += inner[i] * weight(down, down_scales, e * hidden + h, inter, i);
                expected[t * hidden + h] += gates[t * top_k + k] * sum;
            }
        }
    for (int exact : {1, 0}) {
        const Experts given{{up.data, up_scales.data, up_bias.data, 2 * inter, hidden, kMxfp4, exact},
                            {down.data, down_scales.data, down_bias.data, hidden, inter, kMxfp4, exact},
                            experts, 7.0f, 1.702f};
        Exact<float> out(x.count);
        std::memcpy(out.data, x.data, x.count * sizeof(float));
        table->moe(normed.data, tokens, hidden, ids.data, gates.data, top_k, &given, out.data);
        const double most = exact ? 1e-5 : bound(tokens, 0.03, 0.003), found = distance(out.data, expected);
        check(found < most, exact ? "exact experts" : "rounded experts", found, most);
    }
}

static void attention(int64_t query, int64_t context, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window) {
    const int64_t block_size = 16, blocks = (context + block_size - 1) / block_size, group = heads / kv_heads;
    Exact<float> q(query * heads * dim), sinks(heads), out(query * heads * dim);
    Exact<uint16_t> kv(blocks * 2 * kv_heads * block_size * dim);
    for (size_t i = 0; i < q.count; i++) q[i] = normal();
    for (size_t i = 0; i < kv.count; i++) kv[i] = bfloat16(normal());
    for (size_t i = 0; i < sinks.count; i++) sinks[i] = normal();
    Exact<int32_t> tables(blocks), starts(2), contexts(1);
    Exact<int64_t> slots(query);
    for (int64_t i = 0; i < blocks; i++) tables[i] = static_cast<int32_t>(blocks - 1 - i);
    starts[0] = 0, starts[1] = static_cast<int32_t>(query), contexts[0] = static_cast<int32_t>(context);
    const Step step{starts.data, contexts.data, tables.data, slots.data, 1, blocks, block_size, heads, kv_heads, dim, window, 0};
    auto at = [&](int64_t value, int64_t head, int64_t position, int64_t d) {
        return widened(kv[((tables[position / block_size] * 2 + value) * kv_heads + head) * block_size * dim + position % block_size * dim + d]);
    };
    std::vector<double> expected(q.count);
    for (int64_t i = 0; i < query; i++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t position = context - query + i, begin = window > 0 && position >= window ? position - window + 1 : 0;
            double total = std::exp(sinks[head]);
            std::vector<double> sums(dim);
            for (int64_t key = begin; key <= position; key++) {
                double score = 0;
                for (int64_t d = 0; d < dim; d++) score += q[(i * heads + head) * dim + d] * at(0, head / group, key, d);
                const double w = std::exp(score / std::sqrt(double(dim)));
                total += w;
                for (int64_t d = 0; d < dim; d++) sums[d] += w * at(1, head / group, key, d);
            }
            for (int64_t d = 0; d < dim; d++) expected[(i * heads + head) * dim + d] = sums[d] / total;
        }
    table->attention(q.data, kv.data, kBfloat16, sinks.data, &step, out.data);
    check(distance(out.data, expected) < 1e-5, "attention", distance(out.data, expected), 1e-5);
    Step rounded = step;
    rounded.rounded = 1;
    const bool on_tiles = std::strcmp(table->name, "amx") == 0 && query >= 9 && dim % 64 == 0;
    table->attention(q.data, kv.data, kBfloat16, sinks.data, &rounded, out.data);
    const double most = on_tiles ? 0.005 : 1e-5, found = distance(out.data, expected);
    check(found < most && (!on_tiles || found > 1e-4), "rounded attention", found, most);
}

static void sample(int64_t rows, int64_t columns) {
    Exact<float> logits(rows * columns), temperature(rows);
    Exact<int32_t> keys(2 * rows);
    Exact<unsigned char> forbidden(columns);
    std::memset(forbidden.data, 0, columns);
    if (columns > 2) forbidden[2] = 1;
    for (size_t i = 0; i < logits.count; i++) logits[i] = normal();
    for (int64_t i = 0; i < rows; i++) temperature[i] = i % 2 ? 0.7f : 0.0f;
    for (int64_t i = 0; i < 2 * rows; i++) keys[i] = static_cast<int32_t>(rng());
    const Sampling given{logits.data, keys.data, temperature.data, forbidden.data, nullptr, nullptr, nullptr, nullptr, rows, columns, 0, 0};
    Exact<int64_t> out(rows);
    table->sample(&given, out.data);
    for (int64_t row = 0; row < rows; row++) {
        int64_t best = 0;
        double most = -INFINITY;
        for (int64_t i = 0; i < columns; i++) {
            double score = forbidden[i] ? -INFINITY : logits[row * columns + i];
            if (temperature[row] > 0) {
                uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B9u + static_cast<uint32_t>(keys[2 * row]);
                x ^= x >> 16, x *= 0x21F0AAADu, x ^= static_cast<uint32_t>(keys[2 * row + 1]), x ^= x >> 15;
                x *= 0x735A2D97u, x ^= x >> 15;
                const float v = std::fmin(float(x >> 1) * 0x1p-31f + 0x1p-32f, 1.0f - 0x1p-24f);
                score = score / temperature[row] - std::log(-std::log1p(-double(v)));
            }
            if (score > most) most = score, best = i;
        }
        check(out[row] == best, "token", double(out[row]), double(best));
    }
}

// One token may be drawn, by top_k or by a small top_p: the best; or those above a share of its probability.
static void filtered(int64_t columns) {
    constexpr int64_t rows = 4;
    Exact<float> logits(rows * columns), temperature(rows), filters(3 * rows);
    Exact<int32_t> keys(2 * rows);
    Exact<unsigned char> forbidden(columns);
    std::memset(forbidden.data, 0, columns);
    for (size_t i = 0; i < logits.count; i++) logits[i] = normal();
    for (int64_t i = 0; i < 2 * rows; i++) keys[i] = static_cast<int32_t>(rng());
    const float all = static_cast<float>(columns), chosen[rows][3] = {{1, 1, 0}, {all, 1e-6f, 0}, {all, 1, 1}, {3, 1, 0}};
    for (int64_t row = 0; row < rows; row++) {
        temperature[row] = 0.8f;
        for (int64_t i = 0; i < 3; i++) filters[row * 3 + i] = chosen[row][i];
    }
    const Sampling given{logits.data, keys.data, temperature.data, forbidden.data, nullptr, nullptr, nullptr, filters.data, rows, columns, 0, 0};
    Exact<int64_t> out(rows);
    table->sample(&given, out.data);
    for (int64_t row = 0; row < rows; row++) {
        int64_t above = 0;
        for (int64_t i = 0; i < columns; i++) above += logits[row * columns + i] > logits[row * columns + out[row]];
        check(above < (row == 3 ? 3 : 1), "rank of a filtered token", double(above), double(row));
    }
}

int main(int argc, char** argv) {
    table = chorale_cpu_table(argc > 1 ? argv[1] : nullptr);
    if (table == nullptr) return std::puts("no such instruction set"), 2;
    chorale_cpu_threads(3, nullptr);
    for (int64_t columns : {1, 31, 32, 33, 96, 129, 2880})
        for (int64_t tokens : {1, 2, 3, 5, 70}) linear(tokens, 1 + columns % 67, columns, tokens % 2, columns % 2 * 2);
    linear(0, 5, 64, false, 0);
    linear(2, 3000, 64, true, 6);
    for (int64_t tokens : {0, 1, 3, 40}) moe(tokens, 96, 160, 5, 3), moe(tokens, 32, 64, 3, 1), moe(tokens, 288, 32, 7, 4);
    moe(290, 32, 32, 2, 1);  // one expert has them all, the other none
    attention(1, 1, 2, 1, 8, 0), attention(1, 200, 16, 2, 64, 0), attention(1, 200, 16, 2, 64, 128);
    attention(37, 300, 6, 2, 24, 33), attention(130, 130, 8, 8, 40, 0), attention(5, 700, 64, 8, 64, 128);
    attention(9, 9, 3, 1, 64, 0), attention(70, 300, 16, 2, 64, 33), attention(40, 100, 4, 2, 128, 0);
    sample(1, 1), sample(3, 17), sample(4, 20001);
    for (int64_t columns : {1, 5, 17, 8192, 50003}) filtered(columns);
    std::printf("%s: %d failures\n", table->name, failures);
    return failures > 0;
}

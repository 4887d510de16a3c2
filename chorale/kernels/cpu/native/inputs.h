// Inputs of matrix products, in the order in which kernels read them.
#pragma once
#include <vector>

constexpr int kGroup = 32;  // weights that share a scale
constexpr int kBlocks = Isa::kBlocks;

inline int64_t num_groups(int64_t columns) { return (columns + kGroup - 1) / kGroup; }
inline int64_t num_steps(int64_t columns) { return (num_groups(columns) + kBlocks - 1) / kBlocks; }

// Inputs rounded to 8 bits, for one step of kBlocks blocks. ``lo`` and ``hi``: even and odd elements, like
// the halves of MXFP4's bytes. ``start``: the negated sum that the offset of unsigned weights adds.
struct alignas(64) RoundedStep {
    signed char lo[16 * kBlocks], hi[16 * kBlocks];
    int start[4 * kBlocks];
    float scale[4 * kBlocks];
};

inline void round_block(const float* x, int64_t count, int offset, int block, RoundedStep& out) {
    float largest = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        const float size = std::fabs(x[i]);
        largest = size > largest || size != size ? size : largest;
    }
    const bool is_finite = largest - largest == 0.0f;  // otherwise all products of the block are NaN
    const float scale = is_finite ? largest / 127.0f : NAN, inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    alignas(64) int rounded[kGroup] = {};
    for (int64_t i = 0; i < count && is_finite; i++) rounded[i] = static_cast<int>(x[i] * inverse + 12582912.0f - 12582912.0f);
    signed char* lo = out.lo + 16 * block;
    signed char* hi = out.hi + 16 * block;
    for (int i = 0; i < 16; i++) {
        lo[i] = static_cast<signed char>(rounded[2 * i]);
        hi[i] = static_cast<signed char>(rounded[2 * i + 1]);
    }
    for (int lane = 0; lane < 4; lane++) {
        int total = 0;
        for (int i = 0; i < 8; i++) total += rounded[8 * lane + i];
        out.start[4 * block + lane] = -offset * total;
        out.scale[4 * block + lane] = scale;
    }
}

inline void round_row(const float* x, int64_t columns, int offset, RoundedStep* out) {
    const int64_t steps = num_steps(columns);
    for (int64_t group = 0; group < steps * kBlocks; group++) {
        const int64_t left = columns - group * kGroup;
        const int64_t count = left < 0 ? 0 : left < kGroup ? left : kGroup;
        round_block(x + group * kGroup, count, offset, static_cast<int>(group % kBlocks), out[group / kBlocks]);
    }
}

// For exact products with MXFP4: for each block, its 16 even and then its 16 odd elements.
inline void part_row(const float* x, int64_t columns, float* out) {
    for (int64_t group = 0; group < num_groups(columns); group++)
        for (int i = 0; i < kGroup; i++) {
            const int64_t from = group * kGroup + i;
            out[group * kGroup + i / 2 + 16 * (i & 1)] = from < columns ? x[from] : 0.0f;
        }
}

inline void norm_row(const float* x, int64_t columns, const float* weight, float eps, float* out) {
    Floats total = splat(0.0f);
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) {
        const Floats v = load(x + i);
        total += v * v;
    }
    for (; i < columns; i++) rest += x[i] * x[i];
    const float factor = 1.0f / std::sqrt((sum(total) + rest) / static_cast<float>(columns) + eps);
    for (i = 0; i + kLanes <= columns; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < columns; i++) out[i] = x[i] * factor * weight[i];
}

// Memory that a thread keeps between ops: newly allocated pages would cost more than the arithmetic.
template <class T> class Space {
  public:
    T* take(int64_t count) {
        if (count > size_) {
            std::free(kept_);
            size_ = count + count / 4;
            void* found = nullptr;
            if (posix_memalign(&found, 64, static_cast<size_t>(size_) * sizeof(T)) != 0) std::abort();
            kept_ = found;
        }
        return static_cast<T*>(kept_);
    }
    ~Space() { std::free(kept_); }

  private:
    void* kept_ = nullptr;
    int64_t size_ = 0;
};

// The inputs of one product for all tokens.
class Inputs {
  public:
    // Uses at least one task per token. ``row(token)`` returns a row of ``columns`` floats.
    template <class Row> void fill(int64_t tokens, const Matrix& weight, const Row& row) {
        columns_ = weight.columns;
        is_rounded_ = !weight.exact;
        const bool parts = weight.element == kMxfp4;
        const int offset = weight.element == kMxfp4 ? Isa::kOffset4 : Isa::kOffset8;
        steps_ = num_steps(columns_);
        width_ = num_groups(columns_) * kGroup;
        if (is_rounded_) rounded_ = rounded_space_.take(tokens * steps_);
        else exact_ = exact_space_.take(tokens * width_);
        const int64_t at_once = tokens > 64 ? 8 : 1;
        chorale::parallel((tokens + at_once - 1) / at_once, [&](long task) {
            for (int64_t token = task * at_once; token < (task + 1) * at_once && token < tokens; token++) {
                const float* x = row(token);
                if (is_rounded_) round_row(x, columns_, offset, rounded_ + token * steps_);
                else if (parts) part_row(x, columns_, exact_ + token * width_);
                else std::memcpy(exact_ + token * width_, x, static_cast<size_t>(columns_) * sizeof(float));
            }
        });
    }
    const RoundedStep* rounded(int64_t token) const { return rounded_ + token * steps_; }
    const float* exact(int64_t token) const { return exact_ + token * width_; }

  private:
    Space<RoundedStep> rounded_space_;
    Space<float> exact_space_;
    RoundedStep* rounded_ = nullptr;
    float* exact_ = nullptr;
    int64_t columns_ = 0, steps_ = 0, width_ = 0;
    bool is_rounded_ = true;
};

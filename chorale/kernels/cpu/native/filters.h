// min_p, top_k and top_p as one threshold on a row's scores, as defined by kernels/reference/sampling/filters.py.
// Scores are counted in bins by their distance from the best; then at most one bin is sorted for each filter.
#pragma once

constexpr float kLowest = -3.40282347e38f;  // a threshold that keeps every token that can be drawn
constexpr int kBins = 2048;
constexpr float kRange = 32.0f;        // range of scores; the last bin has all lower scores
constexpr int64_t kCounted = 4 * 8192;  // columns per task, whatever the number of threads

struct Filters {
    float top_k, top_p, min_p;

    bool counts(int64_t columns) const { return top_k < static_cast<float>(columns); }
    bool is_used(int64_t columns) const { return counts(columns) || top_p < 1.0f || min_p > 0.0f; }
};

struct Bin {
    double mass = 0.0;
    int64_t count = 0;
};

struct Scores {  // scores of a row, in units of the noise; -inf: cannot be drawn
    const float* at;
    int64_t count;
    float best;

    int bin_of(float score) const {
        const float place = (best - score) * (kBins / kRange);
        return place < kBins - 1 ? static_cast<int>(place) : kBins - 1;
    }
    float mass_of(float score) const { return exp(splat(score - best))[0]; }

    void count_part(int64_t begin, int64_t end, Bin* bins) const {
        for (int64_t i = begin; i < end; i += kLanes) {
            float masses[kLanes];
            const int64_t lanes = end - i < kLanes ? end - i : kLanes;
            store(masses, exp(load(at + i) - best));
            for (int64_t lane = 0; lane < lanes; lane++) {
                if (at[i + lane] == -INFINITY) continue;
                Bin& bin = bins[bin_of(at[i + lane])];
                bin.count++;
                bin.mass += static_cast<double>(masses[lane]);
            }
        }
    }

    void count_all(Bin* bins) const {
        const int64_t parts = (count + kCounted - 1) / kCounted;
        static thread_local Space<Bin> space;
        Bin* some = space.take(parts * kBins);
        chorale::parallel(parts, [=, this](long part) {
            for (int bin = 0; bin < kBins; bin++) some[part * kBins + bin] = Bin();
            const int64_t begin = part * kCounted;
            count_part(begin, begin + kCounted < count ? begin + kCounted : count, some + part * kBins);
        });
        for (int bin = 0; bin < kBins; bin++)
            for (int64_t part = 0; part < parts; part++) {
                bins[bin].count += some[part * kBins + bin].count;
                bins[bin].mass += some[part * kBins + bin].mass;
            }
    }

    // The scores of a bin that are at least ``floor``, in descending order.
    void sort(int bin, float floor, std::vector<float>& found) const {
        found.clear();
        for (int64_t i = 0; i < count; i++)
            if (at[i] >= floor && at[i] > -INFINITY && bin_of(at[i]) == bin) found.push_back(at[i]);
        std::sort(found.begin(), found.end(), [](float a, float b) { return a > b; });
    }

    // Returns the threshold below which scores are not drawn.
    float threshold(const Filters& filters) const {
        float found = kLowest;
        if (best == -INFINITY) return found;
        if (filters.min_p > 0.0f) found = best + std::log(filters.min_p);
        const bool has_k = filters.counts(count), has_p = filters.top_p < 1.0f;
        if (has_k || has_p) {
            static thread_local std::vector<float> sorted;
            Bin bins[kBins];
            count_all(bins);
            if (has_k) found = std::max(found, kth(bins, static_cast<int64_t>(filters.top_k), sorted));
            if (has_p) found = std::max(found, nucleus(bins, filters.top_p, found, sorted));
        }
        return found;
    }

  private:
    float kth(const Bin* bins, int64_t k, std::vector<float>& sorted) const {
        for (int bin = 0; bin < kBins; k -= bins[bin++].count)
            if (k <= bins[bin].count) {
                sort(bin, -INFINITY, sorted);
                return sorted[static_cast<size_t>(k > 0 ? k - 1 : 0)];
            }
        return kLowest;  // fewer than k tokens can be drawn
    }

    // Keeps the most likely tokens until their mass reaches ``top_p`` of the mass at or above ``floor``.
    float nucleus(const Bin* bins, float top_p, float floor, std::vector<float>& sorted) const {
        const int last = bin_of(floor);
        double whole = 0.0, before = 0.0;
        for (int bin = 0; bin < last; bin++) whole += bins[bin].mass;
        if (floor == kLowest) {
            whole += bins[last].mass;
        } else {  // only some scores of the bin
            sort(last, floor, sorted);
            for (const float score : sorted) whole += static_cast<double>(mass_of(score));
        }
        const double target = whole * static_cast<double>(top_p);
        int bin = 0;
        for (; bin < last && before + bins[bin].mass < target; bin++) before += bins[bin].mass;
        sort(bin, floor, sorted);
        for (const float score : sorted) {
            before += static_cast<double>(mass_of(score));
            if (before >= target) return score;
        }
        return sorted.empty() ? floor : sorted.back();
    }
};

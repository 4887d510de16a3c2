// Norm, router, choice of experts and their gates.
#pragma once

void route(const float* x, int64_t tokens, int64_t hidden, const float* norm, float eps, const float* weight,
           const float* bias, int64_t experts, int64_t top_k, float* normed, int64_t* ids, float* gates) {
    chorale::parallel(tokens, [&](long token) {
        static thread_local Space<float> space;
        float* scores = space.take(experts);
        float* row = normed + token * hidden;
        norm_row(x + token * hidden, hidden, norm, eps, row);
        const Matrix matrix{weight, nullptr, nullptr, experts, hidden, kFloat32, 1};
        const float* inputs = row;
        multiply_some<1, 1>(DenseRows<float>(matrix), 0, experts, &inputs, 0,
                            [&](int64_t expert, int64_t, float value) { scores[expert] = value + bias[expert]; });
        float most = 0.0f, total = 0.0f;
        for (int64_t k = 0; k < top_k; k++) {  // the lower id wins a tie
            int64_t best = -1;
            for (int64_t expert = 0; expert < experts; expert++) {
                bool is_taken = false;
                for (int64_t j = 0; j < k; j++) is_taken = is_taken || ids[token * top_k + j] == expert;
                if (!is_taken && (best < 0 || scores[expert] > scores[best] ||
                                  (scores[best] == scores[best] && scores[expert] != scores[expert])))
                    best = expert;
            }
            ids[token * top_k + k] = best;
            if (k == 0) most = scores[best];
            total += gates[token * top_k + k] = std::exp(scores[best] - most);
        }
        for (int64_t k = 0; k < top_k; k++) gates[token * top_k + k] /= total;
    });
}

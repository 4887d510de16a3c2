// Experts with many tokens run on tiles, the others as in experts.h.
#pragma once

constexpr int64_t kFewest4 = 6;  // fewest tokens per expert; for fewer, AVX-512 is as fast (2880 by 5760, Granite Rapids)

struct Piece {  // tokens of one expert that a task processes at once
    int64_t expert, begin, count, tile;  // begin: among all pairs; tile: the first packed tile
};

// Moves experts with many tokens from ``all`` to ``many``.
inline void split(Pairs& all, Pairs& many) {
    many.chosen.clear(), many.tokens.clear(), many.gates.clear();
    std::vector<Chosen> few;
    int64_t kept = 0;
    for (const Chosen& one : all.chosen) {
        const bool moves = one.count >= kFewest4;
        if (moves) many.chosen.push_back({one.expert, static_cast<int64_t>(many.tokens.size()), one.count});
        else few.push_back({one.expert, kept, one.count});
        for (auto pair = static_cast<size_t>(one.begin); pair < static_cast<size_t>(one.begin + one.count); pair++) {
            if (moves) {
                many.tokens.push_back(all.tokens[pair]);
                many.gates.push_back(all.gates[pair]);
            } else {  // entries only move towards the front
                all.tokens[static_cast<size_t>(kept)] = all.tokens[pair];
                all.gates[static_cast<size_t>(kept++)] = all.gates[pair];
            }
        }
    }
    all.chosen = few;
    all.tokens.resize(static_cast<size_t>(kept));
    all.gates.resize(static_cast<size_t>(kept));
}

inline std::vector<Piece> pieces_of(const Pairs& pairs) {
    std::vector<Piece> pieces;
    int64_t tile = 0;
    for (const Chosen& one : pairs.chosen) {
        const int64_t all = num_tiles(one.count), parts = (all + kPieceTiles - 1) / kPieceTiles;
        const int64_t most = (all + parts - 1) / parts * kTile;  // pieces of about equal size
        for (int64_t done = 0; done < one.count; done += most) {
            const int64_t left = one.count - done, count = left < most ? left : most;
            pieces.push_back({one.expert, one.begin + done, count, tile});
            tile += num_tiles(count);
        }
    }
    return pieces;
}

// Calls body(piece, panel's first row) in tasks of kTaskRows rows of a piece's expert.
template <class Body> void for_panels(const std::vector<Piece>& pieces, int64_t rows, const Body& body) {
    const int64_t row_tasks = (rows + kTaskRows - 1) / kTaskRows;
    chorale::parallel(static_cast<int64_t>(pieces.size()) * row_tasks, [&](long task) {
        const TileShapes shapes;
        const int64_t begin = task % row_tasks * kTaskRows, end = begin + kTaskRows < rows ? begin + kTaskRows : rows;
        const Piece& piece = pieces[static_cast<size_t>(task / row_tasks)];
        for (int64_t panel = begin; panel < end; panel += kPanel) body(piece, panel);
    });
}

inline void pack_pieces(const std::vector<Piece>& pieces, const Pairs& pairs, const float* normed, int64_t hidden,
                        int64_t columns, uint16_t* packed) {
    const int64_t stride = num_groups(columns) * kTileWords;
    chorale::parallel(static_cast<int64_t>(pieces.size()) * kPieceTiles, [&](long task) {
        const Piece& piece = pieces[static_cast<size_t>(task / kPieceTiles)];
        const int64_t tile = task % kPieceTiles, left = piece.count - tile * kTile;
        if (left <= 0) return;
        const float* from[kTile];
        const int64_t* tokens = pairs.tokens.data() + piece.begin + tile * kTile;
        for (int64_t i = 0; i < left && i < kTile; i++) from[i] = normed + tokens[i] * hidden;
        pack_tile(from, left < kTile ? left : kTile, columns, packed + (piece.tile + tile) * stride);
    });
}

// ``swiglu`` of 16 tokens.
inline Floats swiglu(Floats gate, Floats up, float limit, float alpha) {
    gate = select((Ints)(gate > limit), splat(limit), gate);
    up = select((Ints)(up > limit), splat(limit), select((Ints)(up < -limit), splat(-limit), up));
    return gate / (1.0f + exp(gate * -alpha)) * (up + 1.0f);
}

// Gate and up rows alternate, so 4 rows give two adjacent inputs of ``down``, which its packed tiles pair.
inline void up_tiles(const Experts& experts, const std::vector<Piece>& pieces, const uint16_t* x, uint16_t* inner) {
    const Matrix& matrix = experts.gate_up;
    const int64_t stride = num_groups(experts.down.columns) * kTileWords;
    for_panels(pieces, matrix.rows, [&](const Piece& piece, int64_t panel) {
        const Mxfp4Tiles rows(matrix, piece.expert * matrix.rows);
        const auto* bias = static_cast<const float*>(matrix.bias) + piece.expert * matrix.rows + panel;
        const uint16_t* from = x + piece.tile * rows.num_steps() * kTileWords;
        multiply_panel(rows, panel, matrix.rows, from, num_tiles(piece.count), [&](int64_t tile, const float* sums) {
            uint16_t* to = inner + (piece.tile + tile) * stride + panel / 2 * kTile;
            for (int64_t row = 0; row < kPanel && panel + row < matrix.rows; row += 4) {
                Floats both[2];
                for (int64_t i = 0; i < 2; i++) {
                    const float* at = sums + (row + 2 * i) * kTile;
                    both[i] = swiglu(load(at) + bias[row + 2 * i], load(at + kTile) + bias[row + 2 * i + 1],
                                     experts.limit, experts.alpha);
                }
                _mm512_store_si512(to + row / 2 * kTile, paired((__m512)both[0], (__m512)both[1]));
            }
        });
    });
}

// out [pairs, rows] = gate * (product + bias)
inline void down_tiles(const Experts& experts, const Pairs& pairs, const std::vector<Piece>& pieces,
                       const uint16_t* inner, float* out) {
    const Matrix& matrix = experts.down;
    for_panels(pieces, matrix.rows, [&](const Piece& piece, int64_t panel) {
        const Mxfp4Tiles rows(matrix, piece.expert * matrix.rows);
        const auto* bias = static_cast<const float*>(matrix.bias) + piece.expert * matrix.rows;
        const uint16_t* from = inner + piece.tile * rows.num_steps() * kTileWords;
        multiply_panel(rows, panel, matrix.rows, from, num_tiles(piece.count), [&](int64_t tile, const float* sums) {
            const int64_t first = piece.begin + tile * kTile, left = piece.begin + piece.count - first;
            by_token(sums, panel, matrix.rows, left < kTile ? left : kTile,
                     [&](int64_t token, int64_t row, __mmask16 mask, __m512 values) {
                         const __m512 gate = _mm512_set1_ps(pairs.gates[static_cast<size_t>(first + token)]);
                         values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, bias + row));
                         float* place = out + (first + token) * matrix.rows + row;
                         _mm512_mask_storeu_ps(place, mask, _mm512_mul_ps(values, gate));
                     });
        });
    });
}

// x[token] += its pairs' results, in the order of expert ids.
inline void add_pairs(const Pairs& pairs, const float* results, int64_t tokens, int64_t hidden, float* x) {
    static thread_local std::vector<int64_t> begins, order;
    begins.assign(static_cast<size_t>(tokens) + 1, 0);
    for (int64_t token : pairs.tokens) begins[static_cast<size_t>(token) + 1]++;
    for (size_t token = 0; token < static_cast<size_t>(tokens); token++) begins[token + 1] += begins[token];
    order.resize(pairs.tokens.size());
    for (size_t pair = pairs.tokens.size(); pair-- > 0;)
        order[static_cast<size_t>(--begins[static_cast<size_t>(pairs.tokens[pair]) + 1])] = static_cast<int64_t>(pair);
    // begins[token + 1] is now the start of the token's pairs
    const int64_t *from = begins.data() + 1, *places = order.data(), all = static_cast<int64_t>(order.size());
    chorale::parallel(tokens, [=](long token) {
        const int64_t end = token + 1 < tokens ? from[token + 1] : all;
        float* out = x + token * hidden;
        for (int64_t place = from[token]; place < end; place++) {
            const float* added = results + places[place] * hidden;
            for (int64_t i = 0; i < hidden; i++) out[i] += added[i];
        }
    });
}

inline void run_tiles(const float* normed, int64_t tokens, int64_t hidden, const Experts& experts, const Pairs& pairs,
                      float* x) {
    static thread_local Space<uint16_t> first, second;
    static thread_local Space<float> space;
    const std::vector<Piece> pieces = pieces_of(pairs);
    const int64_t tiles = pieces.back().tile + num_tiles(pieces.back().count);
    uint16_t* packed = first.take(tiles * num_groups(experts.gate_up.columns) * kTileWords);
    uint16_t* inner = second.take(tiles * num_groups(experts.down.columns) * kTileWords);
    float* results = space.take(static_cast<int64_t>(pairs.tokens.size()) * experts.down.rows);
    pack_pieces(pieces, pairs, normed, hidden, experts.gate_up.columns, packed);
    up_tiles(experts, pieces, packed, inner);
    down_tiles(experts, pairs, pieces, inner, results);
    add_pairs(pairs, results, tokens, hidden, x);
}

inline void run_some_on_tiles(const float* normed, int64_t tokens, int64_t hidden, const Experts& experts, Pairs& pairs,
                              float* x) {
    static thread_local Pairs many;
    split(pairs, many);
    if (!pairs.tokens.empty()) run_experts<Mxfp4Rows, Mxfp4Rows>(normed, tokens, hidden, experts, pairs, x);
    if (!many.tokens.empty()) run_tiles(normed, tokens, hidden, experts, many, x);
}

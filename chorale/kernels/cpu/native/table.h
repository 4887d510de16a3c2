// The functions of one instruction set. Arrays are row-major; T tokens, K inputs, N outputs.
#pragma once
#include <cstddef>
#include <cstdint>

namespace chorale {

enum Element : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kMxfp4 = 3 };

// A matrix [N, K]. kInt8: in the format of ``pack``. kMxfp4: blocks [N, K / 32, 16], scales [N, K / 32].
struct Matrix {
    const void* data;
    const void* scales;
    const void* bias;  // [N] float32, or null
    int64_t rows, columns;
    int32_t element;
    int32_t exact;  // 1: inputs stay float32; 0: they are rounded to 8 bits in blocks of 32
    int32_t fixed;  // 1: the order of additions is the same for any number of tokens, so no tiles
    int32_t stride;  // columns in memory from one row to the next; 0: ``columns``. Not for kInt8
};

struct Experts {  // kMxfp4, or dense
    Matrix gate_up;  // [E, 2 I, H]; rows alternate gate, up. ``rows``: rows per expert
    Matrix down;     // [E, H, I]
    int64_t num_experts;
    float limit, alpha;
    const int64_t* ends;  // last columns of the parts of ``down``, ascending
    int64_t num_parts;    // 0: the result is added to x [T, H]; else one addend for each part, to x [parts, T, H]
};

struct Step {  // the sequences of a step, for one group of layers
    const int32_t* query_start;   // [R + 1]
    const int32_t* context_lens;  // [R]
    const int32_t* block_table;   // [R, width]
    const int64_t* slots;         // [T]
    int64_t num_rows, width, block_size;
    int64_t heads, kv_heads, head_dim, window;  // window 0: no window
    int64_t rounded;                            // queries and weights may be rounded to bfloat16
};

struct Sampling {  // rows of logits; ``SamplingInputs`` in kernels/ops.py
    const float* logits;             // [N, V]
    const int32_t* keys;             // [N, 2]
    const float* temperature;        // [N]
    const unsigned char* forbidden;  // [V]
    const int32_t* allowed_index;    // [N] or null
    const unsigned char* allowed;
    const int32_t* early_stops;  // [N, 8] or null
    const float* filters;        // [N, 3] top_k, top_p, min_p, or null
    int64_t rows, columns, allowed_stride, stops_stride;
};

struct Table {
    const char* name;
    int64_t (*packed_bytes)(int64_t columns);  // size of a row of an int8 matrix
    void (*pack)(const void* source, int32_t element, int64_t rows, int64_t columns, void* out);
    // out [T, N] = norm(x) W^T + bias, or out += that. norm may be null. Any element.
    void (*linear)(const float* x, int64_t tokens, const float* norm, float eps, const Matrix* weight, float* out,
                   int32_t adds);
    void (*rotate_and_cache)(const float* qkv, int64_t tokens, const float* rope, const Step* step, void* kv,
                             int32_t element, float* q);
    void (*attention)(const float* q, const void* kv, int32_t element, const float* sinks, const Step* step,
                      float* out);
    void (*route)(const float* x, int64_t tokens, int64_t hidden, const float* norm, float eps,
                  const float* weight, const float* bias, int64_t experts, int64_t top_k, float* normed,
                  int64_t* ids, float* gates);
    void (*moe)(const float* normed, int64_t tokens, int64_t hidden, const int64_t* ids, const float* gates,
                int64_t top_k, const Experts* experts, float* x);
    void (*sample)(const Sampling* given, int64_t* out);  // out [N]: ids, or the codes in kernels/ops.py
};

}  // namespace chorale

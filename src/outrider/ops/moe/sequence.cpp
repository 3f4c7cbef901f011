// The routed experts and the gated product: see sequence.py.
//
// Letters: N rows, k experts a row, E experts, C width, I inner width. Pairs of row and expert are sorted by expert;
// those of expert e are starts[e] .. starts[e + 1]. An expert is the work of one thread.

#include "../native.h"

constexpr int64_t ROWS = 128;  // of a block

static inline void gated(const float* gate, const float* up, float* out, int64_t inner) {
#pragma omp simd
    for (int64_t c = 0; c < inner; ++c) out[c] = gate[c] * sigmoid(gate[c]) * up[c];
}

static inline void gated_gradient(const float* grad, const float* gate, const float* up, float* grad_gate,
                                  float* grad_up, int64_t inner) {
#pragma omp simd
    for (int64_t c = 0; c < inner; ++c) {
        const float s = sigmoid(gate[c]), g = grad[c];
        grad_gate[c] = g * up[c] * s * (1.0f + gate[c] * (1.0f - s));
        grad_up[c] = g * gate[c] * s;
    }
}

EXPORT void gated_product(int64_t num_rows, int64_t inner, const float* gate, const float* up, float* output) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i) gated(gate + i * inner, up + i * inner, output + i * inner, inner);
}

EXPORT void gated_product_gradient(int64_t num_rows, int64_t inner, const float* grad, const float* gate,
                                   const float* up, float* grad_gate, float* grad_up) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t at = i * inner;
        gated_gradient(grad + at, gate + at, up + at, grad_gate + at, grad_up + at, inner);
    }
}

EXPORT void routed_experts(int64_t num_rows, int64_t k, int64_t num_experts, int64_t width, int64_t inner,
                           const float* hidden, const int64_t* order, const int64_t* place, const int64_t* starts,
                           const float* weights, const float* gate_up, const float* down, float* products,
                           float* activated, float* outputs, float* result) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t e = 0; e < num_experts; ++e) {
        float* rows = scratch<0>(ROWS * width);
        for (int64_t first = starts[e]; first < starts[e + 1]; first += ROWS) {
            const int64_t count = smaller(ROWS, starts[e + 1] - first);
            for (int64_t i = 0; i < count; ++i)
                std::memcpy(rows + i * width, hidden + order[first + i] / k * width, width * sizeof(float));
            gemm(false, true, count, 2 * inner, width, rows, width, gate_up + e * 2 * inner * width, width, 0.0f,
                 products + first * 2 * inner, 2 * inner);
            for (int64_t i = first; i < first + count; ++i)
                gated(products + i * 2 * inner, products + i * 2 * inner + inner, activated + i * inner, inner);
            gemm(false, true, count, width, inner, activated + first * inner, inner, down + e * width * inner, inner,
                 0.0f, outputs + first * width, width);
        }
    }
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i) {
        float* out = result + i * width;
        for (int64_t j = 0; j < k; ++j) {
            const float* in = outputs + place[i * k + j] * width;
            const float weight = weights[i * k + j];
            if (j == 0) {
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) out[c] = weight * in[c];
            } else {
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) out[c] += weight * in[c];
            }
        }
    }
}

// grad_gate_up and grad_down come zeroed, for the experts without rows.
EXPORT void routed_experts_gradient(int64_t num_rows, int64_t k, int64_t num_experts, int64_t width, int64_t inner,
                                    const float* hidden, const int64_t* order, const int64_t* place,
                                    const int64_t* starts, const float* weights, const float* gate_up,
                                    const float* down, const float* products, const float* activated,
                                    const float* grad, float* grad_inputs, float* grad_hidden, float* grad_weights,
                                    float* grad_gate_up, float* grad_down) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t e = 0; e < num_experts; ++e) {
        float* rows = scratch<0>(ROWS * width);
        float* grads = scratch<1>(ROWS * width);
        float* to_active = scratch<2>(ROWS * inner);
        float* to_products = scratch<3>(ROWS * 2 * inner);
        for (int64_t first = starts[e]; first < starts[e + 1]; first += ROWS) {
            const int64_t count = smaller(ROWS, starts[e + 1] - first);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t row = order[first + i] / k;
                std::memcpy(rows + i * width, hidden + row * width, width * sizeof(float));
                std::memcpy(grads + i * width, grad + row * width, width * sizeof(float));
            }
            gemm(false, false, count, inner, width, grads, width, down + e * width * inner, inner, 0.0f, to_active,
                 inner);
            for (int64_t i = 0; i < count; ++i) {
                const float* active = activated + (first + i) * inner;
                float *to = to_active + i * inner, along = 0.0f;
#pragma omp simd reduction(+ : along)
                for (int64_t c = 0; c < inner; ++c) along += to[c] * active[c];
                const int64_t pair = order[first + i];
                const float weight = weights[pair];
                grad_weights[pair] = along;
#pragma omp simd
                for (int64_t c = 0; c < inner; ++c) to[c] *= weight;
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) grads[i * width + c] *= weight;
                const float* both = products + (first + i) * 2 * inner;
                float* out = to_products + i * 2 * inner;
                gated_gradient(to, both, both + inner, out, out + inner, inner);
            }
            gemm(true, false, width, inner, count, grads, width, activated + first * inner, inner, 1.0f,
                 grad_down + e * width * inner, inner);
            gemm(true, false, 2 * inner, width, count, to_products, 2 * inner, rows, width, 1.0f,
                 grad_gate_up + e * 2 * inner * width, width);
            gemm(false, false, count, width, 2 * inner, to_products, 2 * inner, gate_up + e * 2 * inner * width, width,
                 0.0f, grad_inputs + first * width, width);
        }
    }
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i) {
        float* out = grad_hidden + i * width;
        for (int64_t j = 0; j < k; ++j) {
            const float* in = grad_inputs + place[i * k + j] * width;
            if (j == 0) {
                std::memcpy(out, in, width * sizeof(float));
            } else {
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) out[c] += in[c];
            }
        }
    }
}

// Rows over their root mean square, gated or not: see sequence.py.
//
// A row of the input has `groups` parts of `width` numbers and starts `stride` after the one before; the factor of
// part p is that of p % factors. Activations of the gate: 0 none, 1 sigmoid, 2 silu.

#include "../native.h"

static inline float inverse_rms(const float* x, int64_t width, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < width; ++d) sum += x[d] * x[d];
    return 1.0f / std::sqrt(sum / width + eps);
}

EXPORT void rms_rows(int64_t num_rows, int64_t groups, int64_t width, const float* x, int64_t stride,
                     const float* factor, int64_t factors, const float* gate, int64_t gate_stride,
                     int64_t activation, float eps, float* output) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i)
        for (int64_t p = 0; p < groups; ++p) {
            const float* in = x + i * stride + p * width;
            const float* f = factor + p % factors * width;
            const float* z = gate + i * gate_stride + p * width;
            float* out = output + (i * groups + p) * width;
            const float scale = inverse_rms(in, width, eps);
            if (activation == 0) {
#pragma omp simd
                for (int64_t d = 0; d < width; ++d) out[d] = in[d] * scale * f[d];
            } else if (activation == 1) {
#pragma omp simd
                for (int64_t d = 0; d < width; ++d) out[d] = in[d] * scale * f[d] * sigmoid(z[d]);
            } else {
#pragma omp simd
                for (int64_t d = 0; d < width; ++d) out[d] = in[d] * scale * f[d] * z[d] * sigmoid(z[d]);
            }
        }
}

// grad_factor has one zeroed copy for each thread.
EXPORT void rms_rows_gradient(int64_t num_rows, int64_t groups, int64_t width, const float* x, int64_t stride,
                              const float* factor, int64_t factors, const float* gate, int64_t gate_stride,
                              int64_t activation, float eps, const float* grad, float* grad_x, float* grad_factor,
                              float* grad_gate) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i)
        for (int64_t p = 0; p < groups; ++p) {
            const float* in = x + i * stride + p * width;
            const float* f = factor + p % factors * width;
            const float* z = gate + i * gate_stride + p * width;
            const float* g = grad + (i * groups + p) * width;
            float* gx = grad_x + (i * groups + p) * width;
            float* gz = grad_gate + (i * groups + p) * width;
            float* gf = grad_factor + (omp_get_thread_num() * factors + p % factors) * width;
            const float scale = inverse_rms(in, width, eps);
            float along = 0.0f;
            if (activation == 0) {
#pragma omp simd reduction(+ : along)
                for (int64_t d = 0; d < width; ++d) {
                    const float n = in[d] * scale;
                    gf[d] += g[d] * n;
                    gx[d] = g[d] * f[d];
                    along += gx[d] * n;
                }
            } else {
                const bool is_silu = activation == 2;
#pragma omp simd reduction(+ : along)
                for (int64_t d = 0; d < width; ++d) {
                    const float n = in[d] * scale, s = sigmoid(z[d]);
                    const float active = is_silu ? z[d] * s : s;
                    const float slope = is_silu ? s * (1.0f + z[d] * (1.0f - s)) : s * (1.0f - s);
                    gz[d] = g[d] * n * f[d] * slope;
                    gf[d] += g[d] * n * active;
                    gx[d] = g[d] * f[d] * active;
                    along += gx[d] * n;
                }
            }
            along /= width;
#pragma omp simd
            for (int64_t d = 0; d < width; ++d) gx[d] = scale * (gx[d] - in[d] * scale * along);
        }
}

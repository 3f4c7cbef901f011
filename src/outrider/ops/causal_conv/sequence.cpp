// The depthwise causal convolution and its silu: see sequence.py.
//
// Taps come as [taps, channels], so that channels lie side by side. Sums are not kept: they are four products.

#include "../native.h"

constexpr int64_t ROWS = 64;  // of a block

static inline void sum_taps(const float* rows, int64_t stride, const float* taps, int64_t num_taps, int64_t dilation,
                            int64_t row, int64_t channels, float* out) {
    const float* now = rows + row * stride;
    const float* weight = taps + (num_taps - 1) * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) out[c] = now[c] * weight[c];
    for (int64_t back = 1; back < num_taps && back * dilation <= row; ++back) {
        const float* past = rows + (row - back * dilation) * stride;
        weight -= channels;
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) out[c] += past[c] * weight[c];
    }
}

EXPORT void causal_conv_silu(int64_t batch, int64_t length, int64_t channels, int64_t num_taps, int64_t dilation,
                             const float* rows, int64_t stride, const float* taps, float* output) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < batch * length; ++i) {
        float* out = output + i * channels;
        sum_taps(rows + i / length * length * stride, stride, taps, num_taps, dilation, i % length, channels, out);
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) out[c] *= sigmoid(out[c]);
    }
}

// grad_taps has one zeroed copy for each thread.
EXPORT void causal_conv_silu_gradient(int64_t batch, int64_t length, int64_t channels, int64_t num_taps,
                                      int64_t dilation, const float* rows, int64_t stride, const float* taps,
                                      const float* grad, float* grad_rows, float* grad_taps) {
    const int64_t history = (num_taps - 1) * dilation, per_sequence = (length + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < batch * per_sequence; ++block) {
        const int64_t sequence = block / per_sequence, first = block % per_sequence * ROWS;
        const int64_t stop = smaller(first + ROWS, length), last = smaller(stop + history, length);
        const float* own = rows + sequence * length * stride;
        const float* own_grad = grad + sequence * length * channels;
        float* my_taps = grad_taps + omp_get_thread_num() * num_taps * channels;
        // Gradients of the sums, of this block and of the rows after it that read from it.
        float* to_sums = scratch<0>((ROWS + history) * channels);
        for (int64_t row = first; row < last; ++row) {
            float* out = to_sums + (row - first) * channels;
            const float* in = own_grad + row * channels;
            sum_taps(own, stride, taps, num_taps, dilation, row, channels, out);
#pragma omp simd
            for (int64_t c = 0; c < channels; ++c) {
                const float sig = sigmoid(out[c]);
                out[c] = in[c] * sig * (1.0f + out[c] * (1.0f - sig));
            }
        }
        for (int64_t row = first; row < stop; ++row) {
            float* out = grad_rows + (sequence * length + row) * channels;
            const float* here = to_sums + (row - first) * channels;
            for (int64_t back = 0; back < num_taps; ++back) {
                const int64_t shift = back * dilation, tap = (num_taps - 1 - back) * channels;
                if (row + shift < length) {
                    const float *after = here + shift * channels, *weight = taps + tap;
                    if (back == 0) {
#pragma omp simd
                        for (int64_t c = 0; c < channels; ++c) out[c] = after[c] * weight[c];
                    } else {
#pragma omp simd
                        for (int64_t c = 0; c < channels; ++c) out[c] += after[c] * weight[c];
                    }
                }
                if (row >= shift) {
                    const float* past = own + (row - shift) * stride;
                    float* sum = my_taps + tap;
#pragma omp simd
                    for (int64_t c = 0; c < channels; ++c) sum[c] += here[c] * past[c];
                }
            }
        }
    }
}

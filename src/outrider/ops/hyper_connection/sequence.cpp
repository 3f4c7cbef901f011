// The gated residual over S streams: see sequence.py for the formulas and the meaning of the tensors.
//
// Letters: N rows, S streams, C width, W = S C, R rank of the gate, I = R, or R + S with injection.

#include "../native.h"

constexpr int64_t ROWS = 64;  // of a block

static inline void normalise(const float* x, float* normed, float* inverse_rms, int64_t num_streams, int64_t width,
                             float eps) {
    for (int64_t s = 0; s < num_streams; ++s) {
        const float* in = x + s * width;
        float* out = normed + s * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < width; ++c) sum += in[c] * in[c];
        const float scale = 1.0f / std::sqrt(sum / width + eps);
        inverse_rms[s] = scale;
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) out[c] = in[c] * scale;
    }
}

EXPORT void read_streams(int64_t num_rows, int64_t num_streams, int64_t width, int64_t rank, int64_t inner,
                         const float* x, const float* folded, const float* up, const float* share, float eps,
                         float* gate, float* inverse_rms, float* logits, float* mix, float* hidden,
                         float* strength) {
    const int64_t w = num_streams * width, num_blocks = (num_rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = block * ROWS, count = smaller(ROWS, num_rows - first);
        float* normed = scratch<0>(ROWS * w);
        for (int64_t i = 0; i < count; ++i)
            normalise(x + (first + i) * w, normed + i * w, inverse_rms + (first + i) * num_streams, num_streams,
                      width, eps);
        gemm(false, true, count, inner, w, normed, w, folded, w, 0.0f, logits + first * inner, inner);
        for (int64_t i = first; i < first + count; ++i) {
            const float* l = logits + i * inner;
#pragma omp simd
            for (int64_t r = 0; r < rank; ++r) mix[i * rank + r] = l[r] * sigmoid(l[r]);
            for (int64_t s = rank; s < inner; ++s) strength[i * (inner - rank) + s - rank] = 2.0f * sigmoid(l[s]);
        }
        gemm(false, true, count, w, rank, mix + first * rank, rank, up, rank, 0.0f, gate + first * w, w);
        for (int64_t i = 0; i < count; ++i) {
            float* out = hidden + (first + i) * width;
            for (int64_t s = 0; s < num_streams; ++s) {
                float* g = gate + (first + i) * w + s * width;
                const float *n = normed + i * w + s * width, *f = share + s * width;
                if (s == 0) {
#pragma omp simd
                    for (int64_t c = 0; c < width; ++c) {
                        g[c] = sigmoid(g[c]);
                        out[c] = g[c] * n[c] * f[c];
                    }
                } else {
#pragma omp simd
                    for (int64_t c = 0; c < width; ++c) {
                        g[c] = sigmoid(g[c]);
                        out[c] += g[c] * n[c] * f[c];
                    }
                }
            }
        }
    }
}

// grad_factor, grad_folded and grad_up have one zeroed copy for each thread.
EXPORT void read_streams_gradient(int64_t num_rows, int64_t num_streams, int64_t width, int64_t rank, int64_t inner,
                                  const float* x, const float* inverse_rms, const float* logits, const float* mix,
                                  const float* gate, const float* share, const float* folded, const float* up,
                                  const float* grad_hidden, const float* grad_strength, const float* grad_same,
                                  float* grad, float* grad_factor, float* grad_folded, float* grad_up) {
    const int64_t w = num_streams * width, num_blocks = (num_rows + ROWS - 1) / ROWS;
#pragma omp parallel
    {
        const int64_t thread = omp_get_thread_num();
        float* my_factor = grad_factor + thread * w;
        float* my_folded = grad_folded + thread * inner * w;
        float* my_up = grad_up + thread * w * rank;
        float* normed = scratch<0>(ROWS * w);
        float* to_gate = scratch<1>(ROWS * w);
        float* to_normed = scratch<2>(ROWS * w);
        float* to_logits = scratch<3>(ROWS * (inner + rank));
        float* to_mix = to_logits + ROWS * inner;
#pragma omp for schedule(static)
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t first = block * ROWS, count = smaller(ROWS, num_rows - first);
            for (int64_t i = 0; i < count; ++i) {
                const float* gh = grad_hidden + (first + i) * width;
                for (int64_t s = 0; s < num_streams; ++s) {
                    const int64_t at = (first + i) * w + s * width, here = i * w + s * width;
                    const float scale = inverse_rms[(first + i) * num_streams + s];
                    const float *f = share + s * width, *g = gate + at, *in = x + at;
                    float *n = normed + here, *tg = to_gate + here, *tn = to_normed + here;
                    float* gf = my_factor + s * width;
#pragma omp simd
                    for (int64_t c = 0; c < width; ++c) {
                        const float value = in[c] * scale, gated = g[c] * gh[c], product = gated * value;
                        n[c] = value;
                        gf[c] += product;
                        tn[c] = gated * f[c];
                        tg[c] = product * f[c] * (1.0f - g[c]);
                    }
                }
            }
            gemm(true, false, w, rank, count, to_gate, w, mix + first * rank, rank, 1.0f, my_up, rank);
            gemm(false, false, count, rank, w, to_gate, w, up, rank, 0.0f, to_mix, rank);
            for (int64_t i = 0; i < count; ++i) {
                const float* l = logits + (first + i) * inner;
                float* tl = to_logits + i * inner;
#pragma omp simd
                for (int64_t r = 0; r < rank; ++r) {
                    const float sig = sigmoid(l[r]);
                    tl[r] = to_mix[i * rank + r] * sig * (1.0f + l[r] * (1.0f - sig));
                }
                for (int64_t s = rank; s < inner; ++s) {
                    const float sig = sigmoid(l[s]);
                    tl[s] = grad_strength[(first + i) * (inner - rank) + s - rank] * 2.0f * sig * (1.0f - sig);
                }
            }
            gemm(true, false, inner, w, count, to_logits, inner, normed, w, 1.0f, my_folded, w);
            gemm(false, false, count, w, inner, to_logits, inner, folded, w, 1.0f, to_normed, w);
            for (int64_t i = 0; i < count; ++i) {
                for (int64_t s = 0; s < num_streams; ++s) {
                    const int64_t at = (first + i) * w + s * width, here = i * w + s * width;
                    const float *n = normed + here, *tn = to_normed + here, *same = grad_same + at;
                    float* out = grad + at;
                    float along = 0.0f;
#pragma omp simd reduction(+ : along)
                    for (int64_t c = 0; c < width; ++c) along += n[c] * tn[c];
                    along /= width;
                    const float scale = inverse_rms[(first + i) * num_streams + s];
#pragma omp simd
                    for (int64_t c = 0; c < width; ++c) out[c] = same[c] + scale * (tn[c] - n[c] * along);
                }
            }
        }
    }
}

EXPORT void inject_streams(int64_t num_rows, int64_t num_streams, int64_t width, const float* x,
                           const float* strength, const float* output, float* result) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i) {
        const float* o = output + i * width;
        for (int64_t s = 0; s < num_streams; ++s) {
            const float factor = strength[i * num_streams + s];
            const float* in = x + (i * num_streams + s) * width;
            float* out = result + (i * num_streams + s) * width;
#pragma omp simd
            for (int64_t c = 0; c < width; ++c) out[c] = in[c] + factor * o[c];
        }
    }
}

EXPORT void inject_streams_gradient(int64_t num_rows, int64_t num_streams, int64_t width, const float* grad,
                                    const float* strength, const float* output, float* grad_strength,
                                    float* grad_output) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i) {
        const float* o = output + i * width;
        float* go = grad_output + i * width;
        for (int64_t s = 0; s < num_streams; ++s) {
            const float factor = strength[i * num_streams + s];
            const float* g = grad + (i * num_streams + s) * width;
            float along = 0.0f;
#pragma omp simd reduction(+ : along)
            for (int64_t c = 0; c < width; ++c) along += g[c] * o[c];
            grad_strength[i * num_streams + s] = along;
            if (s == 0) {
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) go[c] = factor * g[c];
            } else {
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) go[c] += factor * g[c];
            }
        }
    }
}

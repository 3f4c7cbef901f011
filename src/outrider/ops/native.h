// What the native kernels share: matrix products, exponentials, threads.
//
// Every kernel is the fused form of one autograd function in the folder beside it, float32 only. Rows are
// taken in blocks that stay in the cache of a core, and blocks are shared out to threads in a fixed order, so
// that a result depends on the number of threads and on nothing else.

#pragma once

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);

extern Sgemm sgemm_;

// Row-major C[m, n] = op(A)[m, k] op(B)[k, n] + beta C, with the row strides given.
inline void gemm(bool a_is_transposed, bool b_is_transposed, int m, int n, int k, const float* a, int a_stride,
                 const float* b, int b_stride, float beta, float* c, int c_stride, float alpha = 1.0f) {
    const char ta = a_is_transposed ? 'T' : 'N', tb = b_is_transposed ? 'T' : 'N';
    sgemm_(&tb, &ta, &n, &m, &k, &alpha, b, &b_stride, a, &a_stride, &beta, c, &c_stride);
}

// exp to about 1e-7 without a call, so that loops over it are vectorised; for |x| < 87.
static inline float exp_inside(float x) {
    const float shifted = x * 1.44269504088896341f + 12582912.0f;
    const float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return p * scale;
}

// For x <= 0 (taken as 0 above), and never below 1e-37: denormal numbers cost a trap each.
static inline float exp_of_negative(float x) {
    x = x < -85.0f ? -85.0f : x;
    return exp_inside(x > 0.0f ? 0.0f : x);
}

// Flat beyond +-60, where it is 1e-26.
static inline float sigmoid(float x) {
    x = x < -60.0f ? -60.0f : x;
    x = x > 60.0f ? 60.0f : x;
    return 1.0f / (1.0f + exp_inside(-x));
}

// Memory of the calling thread that lasts until its next call with the same tag.
template <int Tag>
inline float* scratch(size_t size) {
    static thread_local std::vector<float> memory;
    if (memory.size() < size + 16) memory.resize(size + 16);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

// Cuts matrices out of a piece of memory. They start at different places of a page: where a store and a later load
// differ by a multiple of 4096, as between matrices of 32 x 32, a processor may take one for the other and wait.
class Pieces {
  public:
    static constexpr size_t GAP = 48;

    explicit Pieces(float* memory) : next_(memory) {}

    float* take(size_t size) {
        float* piece = next_;
        next_ += (size + 15) / 16 * 16 + GAP;
        return piece;
    }

  private:
    float* next_;
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

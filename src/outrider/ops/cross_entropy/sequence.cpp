// Cross entropy under a vocabulary matrix, loss and gradient at once: see sequence.py.

#include "../native.h"

constexpr int64_t ROWS = 128;  // of a block; at a vocabulary of 4096, 2 MiB of logits

// grad_hidden and grad_weight are null where they are not wanted; grad_weight has one zeroed copy for each thread.
EXPORT void cross_entropy(int64_t num_rows, int64_t width, int64_t vocabulary, const float* hidden,
                          const float* weight, const int64_t* targets, float* losses, float* grad_hidden,
                          float* grad_weight) {
    const int64_t num_blocks = (num_rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = block * ROWS, count = smaller(ROWS, num_rows - first);
        float* logits = scratch<0>(ROWS * vocabulary);
        gemm(false, true, count, vocabulary, width, hidden + first * width, width, weight, width, 0.0f, logits,
             vocabulary);
        for (int64_t i = 0; i < count; ++i) {
            float* row = logits + i * vocabulary;
            const int64_t target = targets[first + i];
            const float of_target = row[target];
            float largest = row[0], sum = 0.0f;
#pragma omp simd reduction(max : largest)
            for (int64_t c = 0; c < vocabulary; ++c) largest = row[c] > largest ? row[c] : largest;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < vocabulary; ++c) {
                row[c] = exp_of_negative(row[c] - largest);
                sum += row[c];
            }
            losses[first + i] = std::log(sum) + largest - of_target;
            const float scale = 1.0f / sum;
#pragma omp simd
            for (int64_t c = 0; c < vocabulary; ++c) row[c] *= scale;
            row[target] -= 1.0f;
        }
        if (grad_hidden != nullptr)
            gemm(false, false, count, width, vocabulary, logits, vocabulary, weight, width, 0.0f,
                 grad_hidden + first * width, width);
        if (grad_weight != nullptr)
            gemm(true, false, vocabulary, width, count, logits, vocabulary, hidden + first * width, width, 1.0f,
                 grad_weight + omp_get_thread_num() * vocabulary * width, width);
    }
}

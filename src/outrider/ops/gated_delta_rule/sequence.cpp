// The gated delta rule from the zero state: see sequence.py for the formulas and the meaning of the letters.
//
// One task is one key head of one sequence with the value heads that read it. Chunk after chunk it solves the
// triangular system with the state already subtracted, so that nothing but the written rows and the state
// before each chunk is kept; the way back computes the rest again, in the cache.

#include "../native.h"

constexpr int N = 32;  // rows of a chunk

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));

// C[m, 16 * V] (+)= A[m, k] B[k, 16 * V], where A(i, l) = a[i * a_row + l * a_column] and m is a multiple of 8.
template <int V>
static inline void tile(float* c, int c_row, const float* a, int a_row, int a_column, const float* b, int b_row, int m,
                        int k, bool is_added) {
    for (int i = 0; i < m; i += 8) {
        Lanes sums[8][V];
        for (int r = 0; r < 8; ++r)
            for (int v = 0; v < V; ++v)
                sums[r][v] = is_added ? *reinterpret_cast<const Lanes*>(c + (i + r) * c_row + 16 * v) : Lanes{};
        for (int l = 0; l < k; ++l) {
            Lanes row[V];
            for (int v = 0; v < V; ++v) row[v] = *reinterpret_cast<const Lanes*>(b + l * b_row + 16 * v);
            for (int r = 0; r < 8; ++r) {
                const float factor = a[(i + r) * a_row + l * a_column];
                for (int v = 0; v < V; ++v) sums[r][v] += factor * row[v];
            }
        }
        for (int r = 0; r < 8; ++r)
            for (int v = 0; v < V; ++v) *reinterpret_cast<Lanes*>(c + (i + r) * c_row + 16 * v) = sums[r][v];
    }
}

// The same for any number of columns that is a multiple of 16; all matrices but A are dense.
static void product(float* c, const float* a, int a_row, int a_column, const float* b, int m, int columns, int k,
                    bool is_added = false) {
    int column = 0;
    for (; column + 32 <= columns; column += 32)
        tile<2>(c + column, columns, a, a_row, a_column, b + column, columns, m, k, is_added);
    if (column < columns) tile<1>(c + column, columns, a, a_row, a_column, b + column, columns, m, k, is_added);
}

static void transpose(float* out, const float* in, int rows, int columns) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) out[j * rows + i] = in[i * columns + j];
}

// Copies `count` rows of `width` numbers and fills up with zeros.
static void load_rows(float* out, const float* in, int64_t stride, int count, int width) {
    for (int i = 0; i < N; ++i) {
        if (i < count)
            std::memcpy(out + i * width, in + i * stride, width * sizeof(float));
        else
            std::memset(out + i * width, 0, width * sizeof(float));
    }
}

static void scale_rows(float* out, const float* in, const float* factor, int width) {
    for (int i = 0; i < N; ++i) {
#pragma omp simd
        for (int d = 0; d < width; ++d) out[i * width + d] = in[i * width + d] * factor[i];
    }
}

// Solves (I + A) X = X0 in place, A_il = beta_i interaction_il for l < i, on 16 * V columns of rows of `columns`.
template <int V>
static void solve_columns(float* x, const float* beta, const float* interaction, int columns) {
    for (int i = 1; i < N; ++i) {
        // Two sums a row, since one would wait for itself.
        Lanes even[V] = {}, odd[V] = {};
        for (int l = 0; l < i; ++l) {
            const float factor = interaction[i * N + l];
            for (int v = 0; v < V; ++v) {
                const Lanes term = factor * *reinterpret_cast<const Lanes*>(x + l * columns + 16 * v);
                if (l % 2)
                    odd[v] += term;
                else
                    even[v] += term;
            }
        }
        for (int v = 0; v < V; ++v) *reinterpret_cast<Lanes*>(x + i * columns + 16 * v) -= beta[i] * (even[v] + odd[v]);
    }
}

// The same for the transposed system: row after row from the last, each is taken out of those before it.
template <int V>
static void solve_transposed_columns(float* x, const float* beta, const float* interaction, int columns) {
    for (int i = N - 1; i > 0; --i) {
        Lanes row[V];
        for (int v = 0; v < V; ++v) row[v] = beta[i] * *reinterpret_cast<const Lanes*>(x + i * columns + 16 * v);
        for (int l = 0; l < i; ++l)
            for (int v = 0; v < V; ++v)
                *reinterpret_cast<Lanes*>(x + l * columns + 16 * v) -= interaction[i * N + l] * row[v];
    }
}

static void solve(float* x, const float* beta, const float* interaction, int columns, bool is_transposed) {
    const auto two = is_transposed ? solve_transposed_columns<2> : solve_columns<2>;
    const auto one = is_transposed ? solve_transposed_columns<1> : solve_columns<1>;
    int column = 0;
    for (; column + 32 <= columns; column += 32) two(x + column, beta, interaction, columns);
    if (column < columns) one(x + column, beta, interaction, columns);
}

struct Gates {
    float beta[N], growth[N], end[N], write[N], total;  // write = beta growth
    float decay[N * N], gap[Pieces::GAP], interaction[N * N], second_gap[Pieces::GAP], scores[N * N];

    // Where it is inlined, g++ 12 leaves its exponentials unvectorised: seven times slower.
    __attribute__((noinline)) void fill(const float* g, const float* b, int64_t stride, int count, const float* kk,
                                        const float* qk) {
        float sums[N], sum = 0.0f;
        for (int i = 0; i < N; ++i) {
            if (i < count) sum += g[i * stride];
            sums[i] = sum;
            beta[i] = i < count ? b[i * stride] : 0.0f;
        }
#pragma omp simd
        for (int i = 0; i < N; ++i) {
            growth[i] = exp_of_negative(sums[i]);
            end[i] = exp_of_negative(sum - sums[i]);
            write[i] = beta[i] * growth[i];
        }
        total = growth[N - 1];
        for (int i = 0; i < N; ++i) {
            const float own = sums[i];
            const float *k_row = kk + i * N, *q_row = qk + i * N;
            float *d = decay + i * N, *a = interaction + i * N, *p = scores + i * N;
#pragma omp simd
            for (int j = 0; j < N; ++j) {
                const float value = exp_of_negative(own - sums[j]);
                const float kept = j <= i ? value : 0.0f;
                d[j] = kept;
                a[j] = k_row[j] * kept;
                p[j] = q_row[j] * kept;
            }
        }
    }
};

EXPORT void delta_rule(int64_t batch, int64_t length, int64_t key_heads, int64_t group, int64_t dk, int64_t dv,
                       const float* q, int64_t q_row, const float* k, int64_t k_row, const float* v, int64_t v_row,
                       const float* g, const float* beta, float* output, float* written, float* states) {
    const int64_t heads = key_heads * group, num_chunks = (length + N - 1) / N;
#pragma omp parallel for schedule(static)
    for (int64_t task = 0; task < batch * key_heads; ++task) {
        const int64_t b = task / key_heads, key_head = task % key_heads;
        Pieces pieces(scratch<0>(4 * N * dk + 3 * N * dv + 2 * N * N + 9 * (Pieces::GAP + 16)));
        float *kc = pieces.take(N * dk), *qc = pieces.take(N * dk), *kt = pieces.take(N * dk);
        float *scaled = pieces.take(N * dk), *vc = pieces.take(N * dv), *rows = pieces.take(N * dv);
        float *out = pieces.take(N * dv), *kk = pieces.take(N * N), *qk = pieces.take(N * N);
        static thread_local Gates gates;
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            const int64_t first = b * length + chunk * N;
            const int count = static_cast<int>(smaller(N, length - chunk * N));
            load_rows(kc, k + first * k_row + key_head * dk, k_row, count, dk);
            load_rows(qc, q + first * q_row + key_head * dk, q_row, count, dk);
            transpose(kt, kc, N, dk);
            product(kk, kc, dk, 1, kt, N, N, dk);
            product(qk, qc, dk, 1, kt, N, N, dk);
            for (int64_t j = 0; j < group; ++j) {
                const int64_t head = key_head * group + j, lane = b * heads + head;
                const float* state = states + (lane * (num_chunks + 1) + chunk) * dk * dv;
                float* next = states + (lane * (num_chunks + 1) + chunk + 1) * dk * dv;
                gates.fill(g + first * heads + head, beta + first * heads + head, heads, count, kk, qk);
                load_rows(vc, v + first * v_row + head * dv, v_row, count, dv);
                // rows = beta v - (beta growth k) M, then the triangular system.
                for (int i = 0; i < N; ++i)
#pragma omp simd
                    for (int64_t d = 0; d < dk; ++d) scaled[i * dk + d] = -gates.write[i] * kc[i * dk + d];
                scale_rows(rows, vc, gates.beta, dv);
                product(rows, scaled, dk, 1, state, N, dv, dk, true);
                solve(rows, gates.beta, gates.interaction, dv, false);
                std::memcpy(written + (lane * num_chunks + chunk) * N * dv, rows, N * dv * sizeof(float));
                scale_rows(scaled, qc, gates.growth, dk);
                product(out, scaled, dk, 1, state, N, dv, dk);
                product(out, gates.scores, N, 1, rows, N, dv, N, true);
                for (int i = 0; i < count; ++i)
                    std::memcpy(output + ((first + i) * heads + head) * dv, out + i * dv, dv * sizeof(float));
                scale_rows(scaled, kc, gates.end, dk);
                for (int64_t d = 0; d < dk * dv; ++d) next[d] = gates.total * state[d];
                product(next, scaled, 1, dk, rows, dk, dv, N, true);
            }
        }
    }
}

// Adds to the gradients of the running sums, of beta and of the two score matrices what comes through D_ij.
static void through_decay(const Gates& gates, const float* to_interaction, const float* to_scores, const float* qk,
                          float* to_kk, float* to_qk, float* to_beta, float* to_sums) {
    for (int i = 0; i < N; ++i) {
        float row = 0.0f, row_beta = 0.0f;
#pragma omp simd reduction(+ : row, row_beta)
        for (int l = 0; l < N; ++l) {
            const int at = i * N + l;
            const float ti = l < i ? to_interaction[at] : 0.0f, ts = to_scores[at] * gates.decay[at];
            const float through_beta = ti * gates.interaction[at];
            const float along = through_beta * gates.beta[i] + ts * qk[at];
            row_beta += through_beta;
            row += along;
            to_sums[l] -= along;
            to_kk[at] += ti * gates.beta[i] * gates.decay[at];
            to_qk[at] += ts;
        }
        to_beta[i] += row_beta;
        to_sums[i] += row;
    }
}

EXPORT void delta_rule_gradient(int64_t batch, int64_t length, int64_t key_heads, int64_t group, int64_t dk,
                                int64_t dv, const float* q, int64_t q_row, const float* k, int64_t k_row,
                                const float* v, int64_t v_row, const float* g, const float* beta,
                                const float* written, const float* states, const float* grad_output, float* grad_q,
                                float* grad_k, float* grad_v, float* grad_g, float* grad_beta) {
    const int64_t heads = key_heads * group, num_chunks = (length + N - 1) / N;
#pragma omp parallel for schedule(static)
    for (int64_t task = 0; task < batch * key_heads; ++task) {
        const int64_t b = task / key_heads, key_head = task % key_heads;
        const size_t size = 9 * N * dk + 5 * N * dv + 6 * N * N + (group + 2) * dk * dv;
        Pieces pieces(scratch<1>(size + 23 * (Pieces::GAP + 16)));
        float *kc = pieces.take(N * dk), *qc = pieces.take(N * dk), *kt = pieces.take(N * dk);
        float *scaled = pieces.take(N * dk), *to_q = pieces.take(N * dk), *to_k = pieces.take(N * dk);
        float *to_grown = pieces.take(N * dk), *to_end = pieces.take(N * dk), *to_write = pieces.take(N * dk);
        float *vc = pieces.take(N * dv), *wc = pieces.take(N * dv), *wt = pieces.take(N * dv);
        float *go = pieces.take(N * dv), *to_rows = pieces.take(N * dv), *kk = pieces.take(N * N);
        float *qk = pieces.take(N * N), *to_kk = pieces.take(N * N), *to_qk = pieces.take(N * N);
        float *to_scores = pieces.take(N * N), *to_interaction = pieces.take(N * N);
        float *turned = pieces.take(dk * dv), *turned_after = pieces.take(dk * dv);
        float* to_states = pieces.take(group * dk * dv);
        std::memset(to_states, 0, group * dk * dv * sizeof(float));
        static thread_local Gates gates;
        for (int64_t chunk = num_chunks - 1; chunk >= 0; --chunk) {
            const int64_t first = b * length + chunk * N;
            const int count = static_cast<int>(smaller(N, length - chunk * N));
            load_rows(kc, k + first * k_row + key_head * dk, k_row, count, dk);
            load_rows(qc, q + first * q_row + key_head * dk, q_row, count, dk);
            transpose(kt, kc, N, dk);
            product(kk, kc, dk, 1, kt, N, N, dk);
            product(qk, qc, dk, 1, kt, N, N, dk);
            for (float* zeroed : {to_kk, to_qk}) std::memset(zeroed, 0, N * N * sizeof(float));
            for (float* zeroed : {to_q, to_k}) std::memset(zeroed, 0, N * dk * sizeof(float));
            for (int64_t j = 0; j < group; ++j) {
                const int64_t head = key_head * group + j, lane = b * heads + head;
                const float* state = states + (lane * (num_chunks + 1) + chunk) * dk * dv;
                float* after = to_states + j * dk * dv;
                float to_beta[N] = {}, to_sums[N] = {};
                gates.fill(g + first * heads + head, beta + first * heads + head, heads, count, kk, qk);
                load_rows(vc, v + first * v_row + head * dv, v_row, count, dv);
                load_rows(wc, written + (lane * num_chunks + chunk) * N * dv, dv, N, dv);
                load_rows(go, grad_output + (first * heads + head) * dv, heads * dv, count, dv);
                transpose(wt, wc, N, dv);
                transpose(turned, state, dk, dv);
                transpose(turned_after, after, dk, dv);
                scale_rows(scaled, kc, gates.end, dk);
                product(to_rows, gates.scores, 1, N, go, N, dv, N);
                product(to_rows, scaled, dk, 1, after, N, dv, dk, true);
                product(to_scores, go, dv, 1, wt, N, N, dv);
                product(to_grown, go, dv, 1, turned, N, dk, dv);
                product(to_end, wc, dv, 1, turned_after, N, dk, dv);
                float to_total = 0.0f;
#pragma omp simd reduction(+ : to_total)
                for (int64_t d = 0; d < dk * dv; ++d) to_total += state[d] * after[d];
                solve(to_rows, gates.beta, gates.interaction, dv, true);
                for (int i = 0; i < count; ++i) {
                    float* gv = grad_v + ((first + i) * heads + head) * dv;
                    float along = 0.0f;
#pragma omp simd reduction(+ : along)
                    for (int64_t d = 0; d < dv; ++d) {
                        along += to_rows[i * dv + d] * vc[i * dv + d];
                        gv[d] = gates.beta[i] * to_rows[i * dv + d];
                    }
                    to_beta[i] += along;
                }
                for (int64_t d = 0; d < N * dv; ++d) to_rows[d] = -to_rows[d];
                product(to_interaction, to_rows, dv, 1, wt, N, N, dv);
                product(to_write, to_rows, dv, 1, turned, N, dk, dv);
                for (int64_t d = 0; d < dk * dv; ++d) after[d] *= gates.total;
                scale_rows(scaled, qc, gates.growth, dk);
                product(after, scaled, 1, dk, go, dk, dv, N, true);
                scale_rows(scaled, kc, gates.write, dk);
                product(after, scaled, 1, dk, to_rows, dk, dv, N, true);
                through_decay(gates, to_interaction, to_scores, qk, to_kk, to_qk, to_beta, to_sums);
                float ends = 0.0f;
                for (int i = 0; i < N; ++i) {
                    float grown = 0.0f, write = 0.0f, end = 0.0f;
                    const float fg = gates.growth[i], fw = gates.write[i], fe = gates.end[i];
#pragma omp simd reduction(+ : grown, write, end)
                    for (int64_t d = 0; d < dk; ++d) {
                        const int64_t at = i * dk + d;
                        grown += to_grown[at] * qc[at];
                        write += to_write[at] * kc[at];
                        end += to_end[at] * kc[at];
                        to_q[at] += fg * to_grown[at];
                        to_k[at] += fw * to_write[at] + fe * to_end[at];
                    }
                    to_beta[i] += write * fg;
                    to_sums[i] += grown * fg + write * fw - end * fe;
                    ends += end * fe;
                }
                to_sums[N - 1] += ends + to_total * gates.total;
                float sum = 0.0f;
                for (int i = N - 1; i >= 0; --i) {
                    sum += to_sums[i];
                    if (i < count) {
                        grad_g[(first + i) * heads + head] = sum;
                        grad_beta[(first + i) * heads + head] = to_beta[i];
                    }
                }
            }
            product(to_q, to_qk, N, 1, kc, N, dk, N, true);
            product(to_k, to_qk, 1, N, qc, N, dk, N, true);
            product(to_k, to_kk, N, 1, kc, N, dk, N, true);
            product(to_k, to_kk, 1, N, kc, N, dk, N, true);
            for (int i = 0; i < count; ++i) {
                std::memcpy(grad_q + ((first + i) * key_heads + key_head) * dk, to_q + i * dk, dk * sizeof(float));
                std::memcpy(grad_k + ((first + i) * key_heads + key_head) * dk, to_k + i * dk, dk * sizeof(float));
            }
        }
    }
}
